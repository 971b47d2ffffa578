"""The opcodes of pickle's protocols 2 to 5. Objects with tensors cannot be stored in protocol 0 or 1.

A handler takes the machine and the position after its opcode, and returns the position of the next opcode.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ...errors import FormatError
from .machine import EndOfDataError, Machine

_Handler = Callable[[Machine, int], int]

_MAX_INT_BYTES = 512
_UINT1, _UINT2, _INT4, _UINT4, _UINT8 = (struct.Struct(code) for code in ("<B", "<H", "<i", "<I", "<Q"))
_DOUBLE = struct.Struct(">d")


def _unknown(machine: Machine, position: int) -> int:
    raise FormatError(f"opcode 0x{machine.data[position - 1]:02x} is unknown or not supported")


def _protocol(machine: Machine, position: int) -> int:
    if machine.take(position, 1)[0] > 5:
        raise FormatError(f"pickle protocol {machine.data[position]} is newer than 5")
    return position + 1


def _frame(machine: Machine, position: int) -> int:
    machine.take(position, 8)  # frames matter to readers of streams only
    return position + 8


def _constant(value: Any) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        return position

    return handler


def _container(kind: Callable[[], Any], cost: int) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        machine.push(kind(), cost)
        return position

    return handler


def _fixed(layout: struct.Struct, action: Callable[[Machine, Any], None]) -> _Handler:
    """The handler of an opcode that one number follows."""

    def handler(machine: Machine, position: int) -> int:
        action(machine, layout.unpack(machine.take(position, layout.size))[0])
        return position + layout.size

    return handler


def _number(machine: Machine, value: float) -> None:
    machine.push(value, 40)


def _sized(size: struct.Struct, make: Callable[[bytes], Any], cost: int = 3) -> _Handler:
    """The handler of an opcode that bytes after their length follow. ``cost`` is that of the result for each byte."""

    def handler(machine: Machine, position: int) -> int:
        raw, position = machine.sized(position, size)
        machine.push(make(raw), cost * len(raw) + 40)
        return position

    return handler


def _integer(raw: bytes) -> int:
    if len(raw) > _MAX_INT_BYTES:
        raise FormatError(f"an integer has {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw  # Python 2 had one type for both


def _short_text(machine: Machine, position: int) -> int:
    data = machine.data
    end = position + 1 + data[position]
    if end > len(data):
        raise EndOfDataError
    machine.push(data[position + 1 : end].decode("utf-8"), 100 + end - position)
    return end


def _byte(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


def _simple(action: Callable[[Machine], None]) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        action(machine)
        return position

    return handler


def _short_get(machine: Machine, position: int) -> int:
    machine.stack.append(machine.memo[machine.data[position]])
    return position + 1


def _memoize(machine: Machine, position: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    machine.budget -= 90
    return position


def _short_tuple(length: int) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        items = tuple([machine.stack.pop() for _ in range(length)][::-1])
        machine.push(items, 48 + 8 * length)
        return position

    return handler


def _tuple(machine: Machine) -> None:
    items = tuple(machine.pop_mark())
    machine.push(items, 50 + 8 * len(items))


def _frozenset(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.push(set(), 300)
    machine.add_items(items)
    machine.push(frozenset(machine.stack.pop()), 50 * len(items))


def _append(machine: Machine) -> None:
    machine.append([machine.stack.pop()])


def _set_item(machine: Machine) -> None:
    value = machine.stack.pop()
    machine.set_items([machine.stack.pop(), value])


def _pop(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _global(machine: Machine, position: int) -> int:
    module, position = machine.line(position)
    name, position = machine.line(position)
    machine.find(module.decode("utf-8"), name.decode("utf-8"))
    return position


def _stack_global(machine: Machine) -> None:
    name = machine.stack.pop()
    machine.find(machine.stack.pop(), name)


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.call(machine.stack.pop(), args)


def _new_object(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.call(machine.stack.pop(), args, new=True)


def _new_object_with_names(machine: Machine) -> None:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    machine.call(machine.stack.pop(), args, kwargs, new=True)


_BY_CODE: dict[int, _Handler] = {
    0x80: _protocol,
    0x95: _frame,
    # constants and numbers
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("K"): _byte,
    ord("M"): _fixed(_UINT2, _number),
    ord("J"): _fixed(_INT4, _number),
    ord("G"): _fixed(_DOUBLE, _number),
    0x8A: _sized(_UINT1, _integer),
    0x8B: _sized(_INT4, _integer),
    # text and bytes
    0x8C: _short_text,
    ord("X"): _sized(_UINT4, bytes.decode),
    0x8D: _sized(_UINT8, bytes.decode),
    ord("C"): _sized(_UINT1, bytes, 0),
    ord("B"): _sized(_UINT4, bytes, 0),
    0x8E: _sized(_UINT8, bytes, 0),
    0x96: _sized(_UINT8, bytearray, 1),
    ord("U"): _sized(_UINT1, _text_or_bytes),
    ord("T"): _sized(_INT4, _text_or_bytes),
    # containers
    ord("("): _simple(Machine.mark),
    ord(")"): _constant(()),
    0x85: _short_tuple(1),
    0x86: _short_tuple(2),
    0x87: _short_tuple(3),
    ord("t"): _simple(_tuple),
    ord("]"): _container(list, 100),
    ord("a"): _simple(_append),
    ord("e"): _simple(lambda machine: machine.append(machine.pop_mark())),
    ord("}"): _container(dict, 100),
    ord("s"): _simple(_set_item),
    ord("u"): _simple(lambda machine: machine.set_items(machine.pop_mark())),
    0x8F: _container(set, 300),
    0x90: _simple(lambda machine: machine.add_items(machine.pop_mark())),
    0x91: _simple(_frozenset),
    # stack and memo
    ord("0"): _simple(_pop),
    ord("1"): _simple(lambda machine: machine.pop_mark().clear()),
    0x94: _memoize,
    ord("q"): _fixed(_UINT1, Machine.remember),
    ord("r"): _fixed(_UINT4, Machine.remember),
    ord("h"): _short_get,
    ord("j"): _fixed(_UINT4, lambda machine, index: machine.stack.append(machine.memo[index])),
    # classes and objects
    ord("c"): _global,
    0x93: _simple(_stack_global),
    ord("R"): _simple(_reduce),
    0x81: _simple(_new_object),
    0x92: _simple(_new_object_with_names),
    ord("b"): _simple(Machine.build),
    ord("Q"): _simple(lambda machine: machine.resolve(machine.stack.pop())),
}

HANDLERS: tuple[_Handler, ...] = tuple(_BY_CODE.get(code, _unknown) for code in range(256))
"""The handler of each opcode. STOP has none: the interpreter handles it."""
