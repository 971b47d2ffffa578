"""Interpret a pickle without importing, calling or opening anything that it names.

``pickle`` itself is not used: it runs code, and nine bytes make it allocate half a gigabyte. ``pickletools`` only
decodes the arguments of opcodes, and takes no more memory than their bytes.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from ...errors import FormatError
from ...runtime import gc_pause
from .bounds import check_tree
from .machine import Machine, Persistent

_Handler = Callable[[Machine, Any], None]

_MAX_INT_BITS = 4096


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
