"""Encode columns of numbers and names so that they compress well.

Names differ in a few numbers (``model.layers.17.mlp.experts.203.up_proj.weight``): the text around the numbers is
stored once, and the numbers become columns. A column of numbers is stored as differences between neighbours, shuffled
by byte (all lowest bytes first), so that most bytes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from ...errors import FormatError
from ...format.msgpack_scan import unpack_plain
from ...tensors.geometry import Int64

__all__ = ["compress", "expand", "name_columns", "number_column", "read_name_columns", "read_number_column"]

# A packed layout comes from a cache or a peer: these limits bound what a hostile one can allocate.
_MAX_RAW_BYTES = 256 << 20  # of a decompressed layout, and of its names
_MAX_NUMBERS = 16  # in one name
_ZSTD_LEVEL = 19

# Without numbers that have leading zeros, which printing would not restore.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")


def compress(payload: bytes) -> bytes:
    """``payload`` in a zstd frame that declares its size."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(payload)


def expand(what: str, data: bytes) -> Any:
    """Decode the msgpack document in a zstd frame. Raises ``FormatError`` before any large allocation."""
    try:
        # zstandard trusts the size in the frame over max_output_size, so check that size first.
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _MAX_RAW_BYTES:
            raise FormatError(f"{what}: a zstd frame of {size} bytes; between 0 and {_MAX_RAW_BYTES} are allowed")
        payload = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} is not a zstd frame: {error}") from None
    return unpack_plain(what, payload, max_depth=8)


def number_column(values: Sequence[int] | Int64) -> bytes:
    """Encode numbers from 0 to 2^62."""
    column = np.asarray(values, np.int64)
    steps = np.diff(column, prepend=np.int64(0)).astype("<i8")
    return np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 8).T).tobytes()


def read_number_column(what: str, data: object, count: int | None = None, *, below: int = 1 << 62) -> list[int]:
    """Decode ``count`` numbers (None: any count). Raises ``FormatError`` unless all are in [0, ``below``)."""
    if not isinstance(data, bytes) or len(data) % 8 or (count is not None and len(data) != 8 * count):
        raise FormatError(f"{what} is not a column of {'' if count is None else f'{count} '}numbers")
    shuffled = np.frombuffer(data, np.uint8).reshape(8, -1)
    steps = np.ascontiguousarray(shuffled.T).view("<i8").reshape(-1)
    values = np.cumsum(steps.astype(np.int64))  # an overflow wraps around and fails the check below
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= below):
        raise FormatError(f"{what}: numbers from {values.min()} to {values.max()}; 0 to {below - 1} are allowed")
    found: list[int] = values.tolist()
    return found


def name_columns(names: Sequence[str]) -> dict[str, Any]:
    """Encode names as patterns of text and columns of the numbers between."""
    patterns: dict[tuple[str, ...], int] = {}
    pattern: list[int] = []
    numbers: list[list[int]] = []
    for name in names:
        pieces = _NUMBER.split(name, maxsplit=_MAX_NUMBERS)
        pattern.append(patterns.setdefault(tuple(pieces[::2]), len(patterns)))
        for position, number in enumerate(pieces[1::2]):
            if position == len(numbers):
                numbers.append([])
            numbers[position].append(int(number))
    return {
        "patterns": [list(pieces) for pieces in patterns],
        "pattern": number_column(pattern),
        "numbers": [number_column(column) for column in numbers],
    }


def read_name_columns(what: str, columns: object) -> list[str]:
    """Decode names. Raises ``FormatError`` for malformed columns and for duplicate names."""
    if not isinstance(columns, dict) or set(columns) != {"patterns", "pattern", "numbers"}:
        raise FormatError(f"{what}: the fields are not those of columns of names")
    patterns, numbers = columns["patterns"], columns["numbers"]
    if not isinstance(patterns, list) or not all(map(_is_pattern, patterns)) or not isinstance(numbers, list):
        raise FormatError(f"{what}: a pattern is not a list of text with at most {_MAX_NUMBERS} numbers between")
    pattern = read_number_column(f"{what}, pattern", columns["pattern"], below=max(len(patterns), 1))
    if pattern and not patterns:
        raise FormatError(f"{what}: there are names but no patterns")
    lengths = [sum(map(len, pieces)) + 16 * (len(pieces) - 1) for pieces in patterns]
    if sum(lengths[index] for index in pattern) > _MAX_RAW_BYTES:
        raise FormatError(f"{what}: more than {_MAX_RAW_BYTES} bytes of names")
    counts = [sum(len(patterns[index]) > position + 1 for index in pattern) for position in range(len(numbers))]
    if any(len(patterns[index]) - 1 > len(numbers) for index in pattern):
        raise FormatError(f"{what}: a pattern has more numbers than there are columns")
    values = [
        iter(read_number_column(f"{what}, numbers {position}", column, counts[position], below=10**15))
        for position, column in enumerate(numbers)
    ]
    names = [
        "".join(
            piece + (str(next(values[position])) if position < len(patterns[index]) - 1 else "")
            for position, piece in enumerate(patterns[index])
        )
        for index in pattern
    ]
    if len(set(names)) != len(names):
        raise FormatError(f"{what}: a name occurs twice")
    return names


def _is_pattern(pieces: object) -> bool:
    return (
        isinstance(pieces, list)
        and 0 < len(pieces) <= _MAX_NUMBERS + 1
        and all(isinstance(piece, str) for piece in pieces)
    )
