"""Decode one msgpack document to Python objects, with the keys that plain values may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from ...errors import FormatError, StateError, UnserializableError
from ..msgpack_scan import scan_msgpack
from .types import MAX_DEPTH, check_hashes, check_key

_MAX_DEPTH = MAX_DEPTH + 3  # levels of the value, and those that a values file adds


def unpack(data: bytes, where: str, *, ext_hook: Callable[[int, bytes], Any]) -> Any:
    """Decode ``data``; ``ext_hook`` creates objects of extension types. ``where`` names the document in errors.

    Raises ``FormatError`` for anything but one document, before it allocates more than a small multiple of its length.
    """
    scan_msgpack(where, data, max_depth=_MAX_DEPTH, extensions=True)
    try:
        return msgpack.unpackb(
            data, raw=False, use_list=True, strict_map_key=False, ext_hook=ext_hook, object_pairs_hook=unique_pairs
        )
    except StateError:  # ``ext_hook`` refuses a pickle; this error is also a ValueError
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FormatError(f"{where}: not a valid msgpack document: {error or type(error).__name__}") from error


def unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a stored mapping. Raises ``FormatError`` for a duplicate or invalid key."""
    result: dict[Any, Any] = {}
    for key, _ in pairs:
        _check_stored_key(key)
    check_hashes(key for key, _ in pairs)
    for key, value in pairs:
        if key in result:
            raise FormatError("a mapping has a key twice")
        result[key] = value
    return result


def _check_stored_key(key: Any) -> None:
    try:
        check_key(key, "a stored mapping")
    except UnserializableError as error:
        raise FormatError(str(error)) from None
