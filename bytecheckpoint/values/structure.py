"""A msgpack document is looked over before it is unpacked.

msgpack allocates an array by its claimed count, once for every level of nesting, so a few kilobytes could otherwise
ask for terabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from ..errors import FormatError, UnserializableError
from .types import MAX_DEPTH, check_key

__all__ = ["unique_pairs", "unpack"]

# First bytes of msgpack: (bytes of length field, bytes that follow beside it, items per counted element).
_SIZED: dict[int, tuple[int, int]] = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
_FIXED: dict[int, int] = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_COUNTED: dict[int, tuple[int, int]] = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def _check_structure(data: bytes, where: str) -> None:
    """Refuse nesting beyond ``MAX_DEPTH`` and counts beyond the bytes there are.

    msgpack allocates an array by its claimed count, once for every level of nesting, so a few kilobytes could
    otherwise ask for terabytes.
    """
    size = len(data)
    pos = 0
    pending = [1]  # items still to come, by level
    outstanding = 1
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        pending[-1] -= 1
        outstanding -= 1
        if pos >= size:
            raise FormatError(f"{where}: cut short at byte {pos}")
        first = data[pos]
        pos += 1
        count = -1
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x9F:
            count = (first & 0x0F) * (2 if first <= 0x8F else 1)
        elif first <= 0xBF:
            pos += first & 0x1F
        elif first in _FIXED:
            pos += _FIXED[first]
        elif first in _SIZED:
            width, extra = _SIZED[first]
            pos += int.from_bytes(data[pos : pos + width], "big") + width + extra
        elif first in _COUNTED:
            width, factor = _COUNTED[first]
            count = int.from_bytes(data[pos : pos + width], "big") * factor
            pos += width
        else:
            raise FormatError(f"{where}: byte {pos - 1} ({first:#x}) begins no msgpack value")
        if count >= 0:
            outstanding += count
            pending.append(count)
            if len(pending) > MAX_DEPTH + 4:
                raise FormatError(f"{where}: nested more than {MAX_DEPTH} levels deep")
        if outstanding > size - pos:
            raise FormatError(f"{where}: {outstanding} more items promised at byte {pos}, but {size - pos} bytes left")
    if pos != size:
        raise FormatError(f"{where}: {size - pos} bytes after the end of the value")


def unpack(
    data: bytes,
    where: str,
    *,
    ext_hook: Callable[[int, bytes], Any],
    pairs_hook: Callable[[list[tuple[Any, Any]]], Any] | None = None,
) -> Any:
    _check_structure(data, where)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=False,
            ext_hook=ext_hook,
            object_pairs_hook=pairs_hook or unique_pairs,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FormatError(f"{where}: not a valid msgpack document: {error or type(error).__name__}") from error


def unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in pairs:
        _check_stored_key(key)
        if key in result:
            raise FormatError("a mapping has one key twice")
        result[key] = value
    return result


def _check_stored_key(key: Any) -> None:
    try:
        check_key(key, "a stored mapping")
    except UnserializableError as error:
        raise FormatError(str(error)) from None
