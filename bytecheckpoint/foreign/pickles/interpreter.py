"""Interpret a pickle without importing, calling or opening anything that it names.

``pickle`` itself is not used: it runs code, and nine bytes make it allocate half a gigabyte. ``pickletools`` only
decodes the arguments of opcodes, and takes no more memory than their bytes.
"""

from __future__ import annotations

import io
from typing import Any

from ...errors import FormatError
from ...runtime import gc_pause
from .bounds import check_tree
from .machine import Machine, Persistent
from .opcodes import OPCODES

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
    found = interpret_prefix(data, where, persistent)
    if found is None:
        raise FormatError(f"{where}: its pickle ends early; fetch the file again")
    value, end = found
    if end != len(data):
        raise FormatError(f"{where}: {len(data) - end} bytes follow its pickle")
    return value


def interpret_prefix(
    data: bytes, where: str, persistent: Persistent | None = None, start: int = 0
) -> tuple[Any, int] | None:
    """Like ``interpret``, for a pickle that begins at ``start`` and that other bytes may follow.

    Returns the object and the position after the pickle, or None if the data end first.
    """
    if len(data) - start > MAX_PICKLE_BYTES:
        raise FormatError(f"{where}: its pickle has {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read")
    stream, machine, position = io.BytesIO(data), Machine(len(data), persistent), start
    stream.seek(start)
    try:
        with gc_pause.paused():
            while code := stream.read(1):
                position = stream.tell() - 1  # word-ok: a method of files
                if code == _STOP:
                    value = machine.stack.pop()
                    check_tree(value, limit=1_000_000 + 8 * (position - start))
                    return value, position + 1
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
    return None
