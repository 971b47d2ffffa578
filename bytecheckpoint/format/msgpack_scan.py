"""Decode msgpack documents that may be hostile.

A decoder allocates an array as soon as it has read its length, so a few hundred nested arrays that claim four billion
items each exhaust memory. So a document is first walked, which allocates nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

from ..errors import FormatError

_MAX_DEPTH = 64
_MOST_KEYS = 64


def scan_msgpack(what: str, data: bytes) -> None:
    """Raise ``FormatError`` unless ``data`` is exactly one msgpack value, with every item that it announces."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (msgpack.StackError, RecursionError):
        raise FormatError(f"{what}: nested too many levels deep") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"{what}: not a whole msgpack document ({type(error).__name__})") from None
    if rest := len(data) - unpacker.tell():  # word-ok: a method of msgpack
        raise FormatError(f"{what}: {rest} bytes follow the end")


def check_depth(what: str, value: object, max_depth: int) -> None:
    """Raise ``FormatError`` if lists and dicts of a decoded value are nested more than ``max_depth`` levels deep."""
    depth, level = 0, [value]
    while containers := [one for one in level if type(one) is list or type(one) is dict]:
        depth += 1
        if depth > max_depth:
            raise FormatError(f"{what}: nested more than {max_depth} levels deep")
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]


def unpack_plain(what: str, data: bytes) -> Any:
    """Scan and decode a document: None, bool, int, float, str, bytes, list, and dict with unique str or bytes keys.

    Raises ``FormatError`` for anything else, and if it is nested more than 64 levels deep.
    """
    scan_msgpack(what, data)
    value = _unpack(what, data)
    check_depth(what, value, _MAX_DEPTH)
    return value


def unpack_maps(what: str, data: bytes) -> Any:
    """Decode a document like ``unpack_plain``, which has small maps only, and no arrays.

    It needs no scan: nothing is allocated for what such a document announces.
    """
    return _unpack(what, data, max_array_len=0, max_map_len=_MOST_KEYS)


def _unpack(what: str, data: bytes, **limits: int) -> Any:
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, object_pairs_hook=_unique, ext_hook=_refuse, max_ext_len=0, **limits
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what}: not a msgpack document of plain values: {error}") from None


def _refuse(code: int, payload: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed here")


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found
