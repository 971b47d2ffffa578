"""Interpret a pickle without importing, calling or opening anything that it names.

``pickle`` itself is not used: it runs code, and nine bytes make it allocate half a gigabyte. ``pickletools`` only
decodes the arguments of opcodes, and takes no more memory than their bytes.
"""

from __future__ import annotations

import io
import pickletools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from ...errors import FormatError
from ...runtime import gc_pause
from .bounds import check_keys, check_tree, is_predictable
from .classes import FUNCTIONS, find_global, set_state
from .records import Global, Instance

_MAX_INT_BITS = 4096
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
        elif type(target) is not Instance:
            raise FormatError(f"items are appended to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Set keys and values, which alternate, in the mapping on top of the stack."""
        target = self.stack[-1]
        keys, values = items[0::2], items[1::2]
        if len(keys) != len(values):
            raise FormatError("a key has no value")
        self.budget -= 100 * len(keys)
        if type(target) in _MAPPINGS:
            self._check_keys(keys)
            for key, value in zip(keys, values, strict=True):
                target[key] = value
        elif type(target) is not Instance:
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
            self.stack.append(Instance(function, args))
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


_Handler = Callable[[Machine, Any], None]


def _protocol(machine: Machine, version: int) -> None:
    if version > 5:
        raise FormatError(f"pickle protocol {version} is newer than 5")


def _constant(value: Any) -> _Handler:
    return lambda machine, _: machine.push(value, 9)


def _container(kind: Callable[[], Any], cost: int) -> _Handler:
    return lambda machine, _: machine.push(kind(), cost)


def _number(machine: Machine, value: float) -> None:
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        raise FormatError(f"an integer has {value.bit_length()} bits")
    machine.push(value, 40)


def _text(machine: Machine, text: str) -> None:
    if not text.isascii():
        text.encode("utf-8")  # raises for half of a surrogate pair
    machine.push(text, 100 + 4 * len(text))


def _binary(machine: Machine, data: bytes | bytearray) -> None:
    machine.push(data, 100 + 2 * len(data))


def _put(machine: Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]
    machine.budget -= 100


def _taking(count: int, action: Callable[..., None]) -> _Handler:
    """A handler that calls ``action`` with the last objects of the stack in the place of these."""

    def handler(machine: Machine, _: Any) -> None:
        operands = machine.stack[-count:]
        if len(operands) < count:
            raise IndexError("the stack is too short")
        del machine.stack[-count:]
        action(machine, *operands)

    return handler


def _short_tuple(machine: Machine, *items: Any) -> None:
    machine.push(items, 48 + 8 * len(items))


def _tuple(machine: Machine, _: Any) -> None:
    items = tuple(machine.pop_mark())
    machine.push(items, 50 + 8 * len(items))


def _frozenset(machine: Machine, _: Any) -> None:
    items = machine.pop_mark()
    machine.push(set(), 300)
    machine.add_items(items)
    machine.push(frozenset(machine.stack.pop()), 50 * len(items))


def _pop(machine: Machine, _: Any) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _global(machine: Machine, names: str) -> None:
    module, _, name = names.partition(" ")
    machine.find(module, name)


_HANDLERS: dict[str, _Handler] = {
    "PROTO": _protocol,
    "FRAME": lambda machine, _: None,  # frames matter to readers of streams only
    # constants, numbers, text and bytes
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT", "LONG1", "LONG4"), _number),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _text),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _binary),
    # containers
    "MARK": lambda machine, _: machine.mark(),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": _taking(1, _short_tuple),
    "TUPLE2": _taking(2, _short_tuple),
    "TUPLE3": _taking(3, _short_tuple),
    "TUPLE": _tuple,
    "EMPTY_LIST": _container(list, 100),
    "APPEND": _taking(1, lambda machine, item: machine.append([item])),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "EMPTY_DICT": _container(dict, 100),
    "SETITEM": _taking(2, lambda machine, key, value: machine.set_items([key, value])),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "EMPTY_SET": _container(set, 300),
    "ADDITEMS": lambda machine, _: machine.add_items(machine.pop_mark()),
    "FROZENSET": _frozenset,
    # stack and memo
    "POP": _pop,
    "POP_MARK": lambda machine, _: machine.pop_mark().clear(),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.append(machine.memo[index])),
    # classes and objects
    "GLOBAL": _global,
    "STACK_GLOBAL": _taking(2, Machine.find),
    "REDUCE": _taking(2, Machine.call),
    "NEWOBJ": _taking(2, partial(Machine.call, new=True)),
    "NEWOBJ_EX": _taking(3, partial(Machine.call, new=True)),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": _taking(1, Machine.resolve),
}

OPCODES: dict[bytes, tuple[Callable[[BinaryIO], Any] | None, _Handler]] = {
    one.code.encode("latin-1"): (None if one.arg is None else one.arg.reader, _HANDLERS[one.name])
    for one in pickletools.opcodes
    if one.name in _HANDLERS
}
"""What reads the argument of each opcode, and its handler. STOP has none: the interpreter takes the result."""


MAX_PICKLE_BYTES = 512 << 20
"""A larger pickle is refused. A million shards take about 150 MB in the metadata of a DCP checkpoint."""

_STOP = b"."
_FAULTS = (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


def interpret(data: bytes, where: str, persistent: Persistent | None = None) -> Any:
    """Return the object that a pickle contains.

    Dicts, lists, tuples and sets are Python's own, tensors are ``TensorRef``, dtypes are ``DType``, sizes are tuples,
    scalars and arrays of numpy are numpy's, and objects of all other classes are ``Instance``.

    Args:
        data: The pickle, and nothing else.
        where: The file, for error messages.
        persistent: Returns the object of a persistent id. Raises ``FormatError`` if there is none.

    Returns:
        The object. It holds no cycle of plain containers, and they are nested at most ``MAX_DEPTH`` deep.

    Raises:
        FormatError: It is not a valid pickle, or it exceeds a limit.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise FormatError(f"{where}: its pickle has {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read")
    stream, machine, position = io.BytesIO(data), Machine(len(data), persistent), 0
    try:
        with gc_pause.paused():
            while code := stream.read(1):
                position = stream.tell() - 1  # word-ok: a method of files
                if code == _STOP:
                    if position + 1 < len(data):
                        raise FormatError(f"{len(data) - position - 1} bytes follow its end")
                    value = machine.stack.pop()
                    check_tree(value, limit=1_000_000 + 8 * position)
                    return value
                if code not in OPCODES:
                    raise FormatError(f"opcode {code!r} is unknown or not supported")
                read, handle = OPCODES[code]
                argument = None if read is None else read(stream)
                machine.earn(stream.tell() - position)  # word-ok: a method of files
                handle(machine, argument)
                machine.settle()
    except FormatError as error:
        raise FormatError(f"{where}: its pickle is refused at byte {position}: {error}") from error.__cause__
    except _FAULTS as error:
        # pickletools raises ValueError if an argument reaches beyond the end.
        if type(error) is not ValueError or stream.tell() < len(data):  # word-ok: a method of files
            raise FormatError(f"{where}: its pickle is invalid at byte {position}: {error!r:.200}") from error
    raise FormatError(f"{where}: its pickle ends early; fetch the file again")
