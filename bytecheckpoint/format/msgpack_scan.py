"""Check that a msgpack document is harmless before anything is built from it.

A decoder allocates an array as soon as it has read its length, so a few hundred nested arrays that claim four billion
items each exhaust memory. The scan walks the bytes first and allocates nothing.
"""

from __future__ import annotations

from typing import Any

import msgpack

from ..errors import FormatError

# By a value's first byte: the width of the length that follows, the number of other bytes that follow, and for arrays
# and maps the number of items (per entry, if a length follows).
# fmt: off
_PLAIN: dict[int, tuple[int, int, int | None]] = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100)), (0, 0, None)),  # small integers
    **{0x80 + n: (0, 0, 2 * n) for n in range(16)},  # maps
    **{0x90 + n: (0, 0, n) for n in range(16)},  # arrays
    **{0xA0 + n: (0, n, None) for n in range(32)},  # str
    0xC0: (0, 0, None), 0xC2: (0, 0, None), 0xC3: (0, 0, None),  # nil, false, true
    0xC4: (1, 0, None), 0xC5: (2, 0, None), 0xC6: (4, 0, None),  # bin
    0xCA: (0, 4, None), 0xCB: (0, 8, None),  # float
    0xCC: (0, 1, None), 0xCD: (0, 2, None), 0xCE: (0, 4, None), 0xCF: (0, 8, None),  # unsigned integers
    0xD0: (0, 1, None), 0xD1: (0, 2, None), 0xD2: (0, 4, None), 0xD3: (0, 8, None),  # signed integers
    0xD9: (1, 0, None), 0xDA: (2, 0, None), 0xDB: (4, 0, None),  # str
    0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2),  # arrays, maps
}
_WITH_EXTENSIONS = {
    **_PLAIN,
    0xC7: (1, 1, None), 0xC8: (2, 1, None), 0xC9: (4, 1, None),
    0xD4: (0, 2, None), 0xD5: (0, 3, None), 0xD6: (0, 5, None), 0xD7: (0, 9, None), 0xD8: (0, 17, None),
}
# fmt: on

_MOST_KEYS = 64


def scan_msgpack(what: str, data: bytes, *, max_depth: int = 64, extensions: bool = False) -> None:
    """Raise ``FormatError`` unless ``data`` is exactly one msgpack value with room for every item that it claims.

    It may be at most ``max_depth`` levels deep. Extension types are rejected unless ``extensions`` is true; their
    payloads are not scanned.
    """
    codes = _WITH_EXTENSIONS if extensions else _PLAIN
    pending = [1]  # items to come, by nesting level
    outstanding = 1  # items to come in total; each takes at least one byte
    at, size = 0, len(data)
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        if at >= size:
            raise FormatError(f"{what}: truncated at byte {size}, {outstanding} more items are announced")
        code = data[at]
        if code not in codes:
            why = "no such type" if extensions else "extension types are refused"
            raise FormatError(f"{what}: msgpack type 0x{code:02x} at byte {at} is not allowed ({why})")
        width, extra, items = codes[code]
        length = int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else 0
        at += 1 + width + extra
        pending[-1] -= 1
        outstanding -= 1
        if items is None:
            at += length
        else:
            count = items * length if width else items
            pending.append(count)
            outstanding += count
            if len(pending) > max_depth + 1:
                raise FormatError(f"{what}: nested more than {max_depth} levels deep")
        if outstanding > size - at:
            left = max(size - at, 0)
            raise FormatError(f"{what}: {outstanding} more items are announced at byte {at}, {left} bytes are left")
    if at != size:
        raise FormatError(f"{what}: {size - at} bytes follow the end")


def unpack_plain(what: str, data: bytes, *, max_depth: int = 64) -> Any:
    """Scan and decode a document: None, bool, int, float, str, bytes, list, and dict with unique str or bytes keys.

    Raises ``FormatError`` for anything else.
    """
    scan_msgpack(what, data, max_depth=max_depth)
    return _unpack(what, data)


def unpack_maps(what: str, data: bytes) -> Any:
    """Decode a document like ``unpack_plain``, which has small maps only, and no arrays.

    It needs no scan: nothing is allocated for what such a document announces.
    """
    return _unpack(what, data, max_array_len=0, max_map_len=_MOST_KEYS, max_ext_len=0)


def _unpack(what: str, data: bytes, **limits: int) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=_unique, **limits)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what}: not a msgpack document of plain values: {error}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found
