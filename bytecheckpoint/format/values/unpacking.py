"""One stored msgpack document to Python objects, with the keys that plain values may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from ..errors import FormatError, UnserializableError
from ..msgpack_scan import scan_msgpack
from .types import MAX_DEPTH, check_key

__all__ = ["unique_pairs", "unpack"]

_MAX_DEPTH = MAX_DEPTH + 3  # the value's own, and what a values file and the writer's limit put around it


def unpack(data: bytes, where: str, *, ext_hook: Callable[[int, bytes], Any]) -> Any:
    """The document that ``data`` is; ``ext_hook`` makes objects of extension types. ``where`` names it in errors.

    Raises ``FormatError`` for anything that is not one, before allocating more than a small multiple of its length.
    """
    scan_msgpack(where, data, max_depth=_MAX_DEPTH, extensions=True)
    try:
        return msgpack.unpackb(
            data, raw=False, use_list=True, strict_map_key=False, ext_hook=ext_hook, object_pairs_hook=unique_pairs
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FormatError(f"{where}: not a valid msgpack document: {error or type(error).__name__}") from error


def unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A stored mapping. Raises ``FormatError`` for a key that stands twice or that no mapping may have."""
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
