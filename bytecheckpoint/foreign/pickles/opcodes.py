"""The opcodes of pickle's protocols 0 to 5.

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


def _number(layout: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        (value,) = layout.unpack(machine.take(position, layout.size))
        machine.push(value, 40)
        return position + layout.size

    return handler


def _long(size: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        raw, position = machine.sized(position, size)
        if len(raw) > _MAX_INT_BYTES:
            raise FormatError(f"an integer has {len(raw)} bytes")
        machine.push(int.from_bytes(raw, "little", signed=True), 40)
        return position

    return handler


def _int_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    flags = {b"00": False, b"01": True}  # how protocol 0 stores a bool
    machine.push(flags[raw] if raw in flags else int(raw.removesuffix(b"L").decode("ascii")), 40)
    return position


def _float_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    machine.push(float(raw.decode("ascii")), 40)
    return position


def _text(size: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        raw, position = machine.sized(position, size)
        machine.push(raw.decode("utf-8"), 3 * len(raw))
        return position

    return handler


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


def _text_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position, len(machine.data))
    text = raw.decode("raw-unicode-escape")
    text.encode("utf-8")  # raises for half of a surrogate pair, as the other opcodes for text do
    machine.push(text, 4 * len(text))
    return position


def _binary(size: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        raw, position = machine.sized(position, size)
        machine.stack.append(raw)
        return position

    return handler


def _bytearray(machine: Machine, position: int) -> int:
    raw, position = machine.sized(position, _UINT8)
    machine.push(bytearray(raw), len(raw) + 60)
    return position


def _python2_string(size: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        raw, position = machine.sized(position, size)
        machine.push(_text_or_bytes(raw), 3 * len(raw))
        return position

    return handler


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw  # Python 2 had one type for both


def _simple(action: Callable[[Machine], None]) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        action(machine)
        return position

    return handler


def _put(layout: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        machine.remember(layout.unpack(machine.take(position, layout.size))[0])
        return position + layout.size

    return handler


def _get(layout: struct.Struct) -> _Handler:
    def handler(machine: Machine, position: int) -> int:
        machine.stack.append(machine.memo[layout.unpack(machine.take(position, layout.size))[0]])
        return position + layout.size

    return handler


def _short_get(machine: Machine, position: int) -> int:
    machine.stack.append(machine.memo[machine.data[position]])
    return position + 1


def _memoize(machine: Machine, position: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    machine.budget -= 90
    return position


def _put_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    machine.remember(int(raw))
    return position


def _get_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    machine.stack.append(machine.memo[int(raw)])
    return position


def _tuple_1(machine: Machine, position: int) -> int:
    machine.push((machine.stack.pop(),), 56)
    return position


def _tuple_2(machine: Machine, position: int) -> int:
    second = machine.stack.pop()
    machine.push((machine.stack.pop(), second), 64)
    return position


def _tuple_3(machine: Machine, position: int) -> int:
    third, second = machine.stack.pop(), machine.stack.pop()
    machine.push((machine.stack.pop(), second, third), 72)
    return position


def _tuple(machine: Machine) -> None:
    items = tuple(machine.pop_mark())
    machine.push(items, 50 + 8 * len(items))


def _list(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.push(items, 60 + 8 * len(items))


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.push({}, 100)
    machine.set_items(items)


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


def _instance_line(machine: Machine, position: int) -> int:
    position = _global(machine, position)
    function = machine.stack.pop()
    machine.call(function, tuple(machine.pop_mark()), new=True)
    return position


def _object(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.call(items[0], tuple(items[1:]), new=True)


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


def _persistent_line(machine: Machine, position: int) -> int:
    raw, position = machine.line(position)
    machine.resolve(raw.decode("ascii"))
    return position


_BY_CODE: dict[int, _Handler] = {
    0x80: _protocol,
    0x95: _frame,
    # constants and numbers
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("K"): _byte,
    ord("M"): _number(_UINT2),
    ord("J"): _number(_INT4),
    ord("G"): _number(_DOUBLE),
    0x8A: _long(_UINT1),
    0x8B: _long(_INT4),
    ord("I"): _int_line,
    ord("L"): _int_line,
    ord("F"): _float_line,
    # text and bytes
    0x8C: _short_text,
    ord("X"): _text(_UINT4),
    0x8D: _text(_UINT8),
    ord("V"): _text_line,
    ord("C"): _binary(_UINT1),
    ord("B"): _binary(_UINT4),
    0x8E: _binary(_UINT8),
    0x96: _bytearray,
    ord("U"): _python2_string(_UINT1),
    ord("T"): _python2_string(_INT4),
    # containers
    ord("("): _simple(Machine.mark),
    ord(")"): _constant(()),
    0x85: _tuple_1,
    0x86: _tuple_2,
    0x87: _tuple_3,
    ord("t"): _simple(_tuple),
    ord("]"): _container(list, 100),
    ord("l"): _simple(_list),
    ord("a"): _simple(_append),
    ord("e"): _simple(lambda machine: machine.append(machine.pop_mark())),
    ord("}"): _container(dict, 100),
    ord("d"): _simple(_dict),
    ord("s"): _simple(_set_item),
    ord("u"): _simple(lambda machine: machine.set_items(machine.pop_mark())),
    0x8F: _container(set, 300),
    0x90: _simple(lambda machine: machine.add_items(machine.pop_mark())),
    0x91: _simple(_frozenset),
    # stack and memo
    ord("0"): _simple(_pop),
    ord("1"): _simple(lambda machine: machine.pop_mark().clear()),
    ord("2"): _simple(lambda machine: machine.stack.append(machine.stack[-1])),
    0x94: _memoize,
    ord("q"): _put(_UINT1),
    ord("r"): _put(_UINT4),
    ord("p"): _put_line,
    ord("h"): _short_get,
    ord("j"): _get(_UINT4),
    ord("g"): _get_line,
    # classes and objects
    ord("c"): _global,
    0x93: _simple(_stack_global),
    ord("i"): _instance_line,
    ord("o"): _simple(_object),
    ord("R"): _simple(_reduce),
    0x81: _simple(_new_object),
    0x92: _simple(_new_object_with_names),
    ord("b"): _simple(Machine.build),
    ord("P"): _persistent_line,
    ord("Q"): _simple(lambda machine: machine.resolve(machine.stack.pop())),
}

HANDLERS: tuple[_Handler, ...] = tuple(_BY_CODE.get(code, _unknown) for code in range(256))
"""The handler of each opcode. STOP has none: the interpreter handles it."""
