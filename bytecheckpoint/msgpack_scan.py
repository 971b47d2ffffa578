"""Proving a msgpack document harmless before anything is built from it.

A decoder makes room for an array as soon as it has read how long the array claims to be, so a few hundred nested
claims of four billion elements are enough to exhaust memory. The scan walks the bytes first and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import msgpack

from .errors import FormatError

__all__ = ["scan_msgpack", "unpack_plain"]

# Bytes of a fixed-size value after its first byte; what holds a length of its own is in the tables below.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2}
_FIXED |= {0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str: bytes that hold the length
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # arrays and maps: the same, and items per entry


def scan_msgpack(what: str, data: bytes, *, max_depth: int = 64) -> None:
    """Raise ``FormatError`` unless ``data`` is exactly one msgpack value, no deeper than ``max_depth``, with no
    extension types, in which every announced item can be there."""
    pending = [1]  # items still to come, by nesting level
    outstanding = 1  # and in all: each takes at least one byte
    at, size = 0, len(data)
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        if at >= size:
            raise FormatError(f"{what}: cut short at byte {size}, {outstanding} more items are announced")
        pending[-1] -= 1
        at, items = _step(what, data, at + 1, data[at])
        outstanding -= 1
        if items is not None:
            pending.append(items)
            outstanding += items
            if len(pending) > max_depth + 1:
                raise FormatError(f"{what}: nested more than {max_depth} levels deep")
        if outstanding > size - at:
            raise FormatError(
                f"{what}: {outstanding} more items announced at byte {at}, {max(size - at, 0)} bytes left"
            )
    if at != size:
        raise FormatError(f"{what}: {size - at} bytes behind the end")


def _step(what: str, data: bytes, at: int, code: int) -> tuple[int, int | None]:
    """Behind the value (or the header of the container) that ``code`` begins, and how many items the latter holds."""
    if code <= 0x7F or code >= 0xE0:
        return at, None
    if code <= 0x8F:
        return at, 2 * (code & 0x0F)
    if code <= 0x9F:
        return at, code & 0x0F
    if code <= 0xBF:
        return at + (code & 0x1F), None
    if code in _FIXED:
        return at + _FIXED[code], None
    if code in _SIZED:
        width = _SIZED[code]
        return at + width + int.from_bytes(data[at : at + width], "big"), None
    if code in _NESTED:
        width, factor = _NESTED[code]
        return at + width, factor * int.from_bytes(data[at : at + width], "big")
    raise FormatError(
        f"{what}: msgpack type 0x{code:02x} at byte {at - 1} is not allowed (extension types are refused)"
    )


def unpack_plain(what: str, data: bytes, *, max_depth: int = 64) -> Any:
    """Decode a scanned document: None, bool, int, float, str, bytes, list, and dict with str or bytes keys, none twice.

    Raises ``FormatError`` for anything else.
    """
    scan_msgpack(what, data, max_depth=max_depth)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=_unique)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what}: not a msgpack document of plain values: {error}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has one key twice")
    return found
