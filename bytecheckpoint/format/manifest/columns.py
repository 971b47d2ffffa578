"""Encode columns: numbers in the narrowest width that holds them, lists of names, choices, and checksums.

A number column is ``{"w": 1|2|4|8, "d": little-endian unsigned numbers back to back}``. A name column is ``{"n": count,
"d": the names in UTF-8, each followed by a zero byte}``. A column of few distinct names is ``{"of": the names, "index":
numbers}``. A checksum column is the checksums back to back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import FormatError
from ...tensors.tables import Int64
from ..checksums import CHECKSUM_BYTES, Checksums, checksum_column

_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def fields(what: str, found: object, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return ``found`` if it is a map of exactly these keys. Raises ``FormatError``."""
    if not isinstance(found, dict) or set(found) != set(names):
        raise FormatError(f"manifest: {what} does not have exactly the fields {', '.join(names)}")
    return found


def pack_numbers(values: Int64) -> dict[str, Any]:
    """Pack a column of numbers that are all >= 0."""
    if len(values) and int(values.min()) < 0:
        raise FormatError(f"negative number {int(values.min())} in a manifest column")
    top = int(values.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if top < 1 << 8 * w)
    return {"w": width, "d": values.astype(_WIDTHS[width]).tobytes()}


def unpack_numbers(what: str, column: object, count: int | None = None) -> Int64:
    """Return the column of ``count`` numbers below 2^63, or of however many it has. ``what`` names it in errors."""
    if not isinstance(column, dict) or set(column) != {"w", "d"}:
        raise FormatError(f"manifest column {what} is missing or not a column of numbers")
    width, data = column["w"], column["d"]
    is_column = type(width) is int and width in _WIDTHS and isinstance(data, bytes)
    if not is_column or len(data) != width * (len(data) // width if count is None else count):
        size, expected = len(data) if isinstance(data, bytes) else "no", "whole" if count is None else count
        raise FormatError(f"manifest column {what}: {size} bytes of width {width!r:.40} are not {expected} numbers")
    values = np.frombuffer(data, _WIDTHS[width])
    if width == 8 and len(values) and int(values.max()) >= 1 << 63:
        raise FormatError(f"manifest column {what}: number {int(values.max())} is over 2^63-1")
    return values.astype(np.int64)


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


def pack_choices(values: list[str]) -> dict[str, Any]:
    """Pack a column with few distinct strings: the strings, and the index of each row's string."""
    of = sorted(set(values))
    position = {value: i for i, value in enumerate(of)}
    return {"of": pack_names(of), "index": pack_numbers(np.array([position[v] for v in values], np.int64))}


def unpack_choices(what: str, column: object, count: int) -> list[str]:
    """The column of exactly ``count`` strings."""
    found = fields(what, column, ("of", "index"))
    of = unpack_names(what, found["of"])
    index = unpack_numbers(what, found["index"], count)
    if int(index.max(initial=-1)) >= len(of):
        raise FormatError(f"manifest column {what}: choice {int(index.max())} of {len(of)}")
    return [of[i] for i in index.tolist()]


def unpack_checksums(what: str, column: object) -> Checksums:
    """The column of checksums."""
    if not isinstance(column, bytes) or len(column) % CHECKSUM_BYTES:
        raise FormatError(f"manifest column {what} is missing or not a column of checksums")
    return checksum_column(column)
