"""Encode columns: numbers in the narrowest width that holds them, and lists of names.

A number column is ``{"w": 1|2|4|8, "d": little-endian unsigned numbers back to back}``. A name column is ``{"n": count,
"d": the names in UTF-8, each followed by a zero byte}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import FormatError
from ...tensors.tables import Int64
from .document import UInt64

__all__ = ["count_of", "pack_names", "pack_numbers", "unpack_names", "unpack_numbers", "unpack_uint64"]

_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def pack_numbers(values: Int64 | UInt64) -> dict[str, Any]:
    """Pack a column of numbers that are all >= 0."""
    if len(values) and int(values.min()) < 0:
        raise FormatError(f"negative number {int(values.min())} in a manifest column")
    top = int(values.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if top < 1 << 8 * w)
    return {"w": width, "d": values.astype(_WIDTHS[width]).tobytes()}


def unpack_numbers(what: str, column: object, count: int) -> Int64:
    """Return the column of exactly ``count`` numbers below 2^63. ``what`` names it in errors."""
    values = _raw_numbers(what, column, count)
    if values.dtype.itemsize == 8 and len(values) and int(values.max()) >= 1 << 63:
        raise FormatError(f"manifest column {what}: number {int(values.max())} is over 2^63-1")
    return values.astype(np.int64)


def unpack_uint64(what: str, column: object, count: int) -> UInt64:
    """The column of exactly ``count`` numbers below 2^64."""
    return _raw_numbers(what, column, count).astype(np.uint64)


def _raw_numbers(what: str, column: object, count: int) -> np.ndarray[Any, Any]:
    if not isinstance(column, dict) or set(column) != {"w", "d"}:
        raise FormatError(f"manifest column {what} is missing or not a column of numbers")
    width, data = column["w"], column["d"]
    if type(width) is not int or width not in _WIDTHS or not isinstance(data, bytes) or len(data) != width * count:
        size = len(data) if isinstance(data, bytes) else "no"
        raise FormatError(f"manifest column {what}: {size} bytes of width {width!r:.40} are not {count} numbers")
    return np.frombuffer(data, _WIDTHS[width])


def count_of(what: str, column: object) -> int:
    """Return how many numbers a column has, for columns whose length no other column determines."""
    width = column.get("w") if isinstance(column, dict) else None
    data = column.get("d") if isinstance(column, dict) else None
    if type(width) is not int or width not in _WIDTHS or not isinstance(data, bytes):
        raise FormatError(f"manifest column {what} is missing or not a column of numbers")
    return len(data) // width


def pack_names(names: Sequence[str]) -> dict[str, Any]:
    """Pack names. Raises ``FormatError`` for a name with a zero byte or one that is not Unicode text."""
    try:
        data = "".join([f"{name}\0" for name in names]).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"a name is not Unicode text: {error}") from None
    if data.count(b"\0") != len(names):
        raise FormatError(f"name {next(name for name in names if chr(0) in name)!r} has a zero byte")
    return {"n": len(names), "d": data}


def unpack_names(what: str, column: object) -> list[str]:
    """The names of a column."""
    if not isinstance(column, dict) or set(column) != {"n", "d"}:
        raise FormatError(f"manifest column {what} is missing or not a column of names")
    count, data = column["n"], column["d"]
    if type(count) is not int or not isinstance(data, bytes) or count != data.count(b"\0") or data[-1:] not in b"\0":
        raise FormatError(f"manifest column {what}: it does not contain the {count!r:.40} names that it states")
    try:
        names = data.decode().split("\0")
    except UnicodeDecodeError as error:
        raise FormatError(f"manifest column {what} is not UTF-8: {error}") from None
    return names[:-1]
