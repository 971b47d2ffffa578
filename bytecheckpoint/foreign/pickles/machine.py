"""The state of a pickle's interpretation: stack, memo, and the budget that pays for every object."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from ...errors import FormatError
from .bounds import check_keys, is_predictable
from .classes import FUNCTIONS, find_global, set_state
from .records import Global, Instance

_EARNED_PER_BYTE = 48  # the metadata of DCP takes 35, a list of small lists 43
_MOST_SAVED = 64 << 20  # and in addition ...
_MOST_SAVED_PER_BYTE = 12  # ... for each byte of the pickle, because one opcode may set all items of a dict
_MAX_MARKS = 1000
_MAX_PREDICTABLE_KEYS = 10_000  # as many with one hash take seconds
_MAX_NAME = 1000  # characters of a class with its module
_MAPPINGS = frozenset([dict, OrderedDict, Counter])
_SIZE = Global("torch", "Size")
_SEQUENCES = frozenset([list, tuple, dict, set, frozenset])
_TEXTS = frozenset([str, bytes, bytearray])

Persistent = Callable[[Any], Any]
"""Returns the object that a persistent id stands for, such as a storage."""


class Machine:
    """Stack, marks, memo and budget.

    The budget is an estimate in bytes. Every method that creates an object subtracts its size, and interpreting stops
    as soon as the budget is negative: some opcodes of one byte create objects of more than 200. Each byte that is read
    adds to it, up to a limit, so that a pickle is refused where its objects become too many, and not after all memory
    that a pickle of its size may take.
    """

    def __init__(self, size: int, persistent: Persistent | None) -> None:
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}  # a list would be as long as the largest index, which the file chooses
        self.predictable_keys = 0
        self._most_saved = _MOST_SAVED + _MOST_SAVED_PER_BYTE * size
        self.budget = self._most_saved

    def earn(self, nbytes: int) -> None:
        """Add to the budget what an opcode of so many bytes may spend."""
        self.budget += _EARNED_PER_BYTE * nbytes

    def settle(self) -> None:
        """Limit the budget after an opcode. Raises ``FormatError`` if it has spent too much."""
        if self.budget < 0:
            raise FormatError("its objects would take far more memory than its size explains")
        self.budget = min(self.budget, self._most_saved)

    def push(self, value: Any, cost: int) -> None:
        """Push a value. ``cost`` is its size in bytes."""
        self.stack.append(value)
        self.budget -= cost

    def mark(self) -> None:
        """Begin a sequence of items."""
        if len(self.marks) >= _MAX_MARKS:
            raise FormatError(f"more than {_MAX_MARKS} sequences are open")
        self.marks.append(len(self.stack))

    def pop_mark(self) -> list[Any]:
        """Return everything above the last mark, and remove it and the mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def append(self, items: list[Any]) -> None:
        """Append items to the sequence on top of the stack."""
        target = self.stack[-1]
        self.budget -= 9 * len(items)
        if type(target) is list or type(target) is deque:
            target.extend(items)
        elif type(target) is Instance:
            target.items = target.items or []  # most instances have none, and share one empty tuple
            target.items.extend(items)
        else:
            raise FormatError(f"items are appended to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Set keys and values, which alternate, in the mapping on top of the stack."""
        target = self.stack[-1]
        keys, values = items[0::2], items[1::2]
        if len(keys) != len(values):
            raise FormatError("a key has no value")
        self.budget -= 100 * len(keys)
        if type(target) is Instance:
            target.pairs = target.pairs or []
            target.pairs.extend(zip(keys, values, strict=True))
        elif type(target) in _MAPPINGS:
            self._check_keys(keys)
            for key, value in zip(keys, values, strict=True):
                target[key] = value
        else:
            raise FormatError(f"keys are set in a {type(target).__name__}")

    def add_items(self, items: list[Any]) -> None:
        """Add items to the set on top of the stack."""
        target = self.stack[-1]
        if type(target) is not set:
            return self.append(items)
        self.budget -= 100 * len(items)
        self._check_keys(items)
        target.update(items)
        return None

    def _check_keys(self, keys: list[Any]) -> None:
        """Check keys that are added to a container, which may have others with the same hash already."""
        check_keys(keys)
        self.predictable_keys += sum(map(is_predictable, keys))
        if self.predictable_keys > _MAX_PREDICTABLE_KEYS:
            raise FormatError(
                f"more than {_MAX_PREDICTABLE_KEYS} keys of dicts, or items of sets, are tuples of numbers, or complex"
            )

    def find(self, module: Any, name: Any) -> None:
        """Push a class or function: its name, or what this library has in its place."""
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _MAX_NAME:
            raise FormatError("a class has no valid name")
        self.push(find_global(module, name), 200)

    def call(self, function: Any, args: Any, kwargs: Any = None, *, new: bool = False) -> None:
        """Push the result of a call, or a new object. Nothing but functions of this library is ever called."""
        if type(function) is not Global:
            raise FormatError(f"it calls an object of type {type(function).__name__}")
        if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
            raise FormatError(f"the arguments of {function} are no tuple")
        known = None if new or kwargs else FUNCTIONS.get(function)
        self.budget -= 200
        if known is None:
            self.stack.append(Instance(function, args, kwargs))
            return
        for one in args:  # which the function may copy
            if type(one) in _TEXTS:
                self.budget -= 4 * len(one)
            elif type(one) in _SEQUENCES:
                self.budget -= 8 * len(one) if function == _SIZE else 100 * len(one)
        if self.budget >= 0:
            self.stack.append(known(*args))

    def build(self) -> None:
        """Set the state of the object below the top of the stack."""
        state = self.stack.pop()
        self.budget -= set_state(self.stack[-1], state)

    def resolve(self, persistent_id: Any) -> None:
        """Push what a persistent id stands for."""
        if self.persistent is None:
            raise FormatError("it refers to an object outside of the file")
        self.push(self.persistent(persistent_id), 200)
