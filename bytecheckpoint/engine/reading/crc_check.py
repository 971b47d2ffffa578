"""Compare stored bytes with the CRC-32s of whole ranges of files, which the archives of ``torch.save`` have.

A read fetches only what is requested, in any order and from several threads. So each piece is hashed by itself. When
the pieces of a range are complete, their CRC-32s are combined; a range that was only read in part stays unchecked.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ...tensors.tables import Int64
from .stored_files import StoredFiles

__all__ = ["CrcCheck", "CrcTable", "combine_crc32"]

_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, reflected: bit 31 is the coefficient of x^0


@dataclass(frozen=True, eq=False)
class CrcTable:
    """Ranges ``[begin, end)`` of files with their CRC-32s, sorted by file and begin. They do not overlap."""

    file: Int64
    begin: Int64
    end: Int64
    crc: Int64

    @classmethod
    def build(cls, rows: list[tuple[int, int, int, int]]) -> CrcTable:
        """Create a table from ``(file, begin, end, crc)`` rows in any order."""
        columns = np.array(sorted(rows), np.int64).reshape(-1, 4).T
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.file)

    @cached_property
    def by_file(self) -> dict[int, tuple[list[int], list[int]]]:
        """For each file, where its ranges begin, and their rows."""
        found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for row, (file, begin) in enumerate(zip(self.file.tolist(), self.begin.tolist())):
            begins, rows = found[file]
            begins.append(begin)
            rows.append(row)
        return found


class CrcCheck:
    """Checks what one reader reads. Thread-safe; releases the GIL while it hashes."""

    def __init__(self, source: StoredFiles, table: CrcTable) -> None:
        self._source, self._table = source, table
        self._begin, self._end = table.begin.tolist(), table.end.tolist()
        self._pieces: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        self._lock = threading.Lock()

    def feed(self, file: int, begin: int, data: memoryview) -> None:
        """Hash ``data``, the file's bytes from ``begin`` on."""
        begins, rows = self._table.by_file.get(file, ((), ()))
        end = begin + len(data)
        at = max(bisect_right(begins, begin) - 1, 0)
        while at < len(rows) and begins[at] < end:
            low, high = max(begin, begins[at]), min(end, self._end[rows[at]])
            if low < high:
                crc = zlib.crc32(data[low - begin : high - begin])
                with self._lock:
                    self._pieces[rows[at]][low, high] = crc
            at += 1

    def finish(self) -> int:
        """Compare the ranges that were read completely; returns how many bytes they have.

        Raises ``CorruptionError`` for the first range that differs.
        """
        checked = 0
        for row, pieces in sorted(self._pieces.items()):
            found = _combined(pieces, self._begin[row], self._end[row])
            if found is None:
                continue
            if found != int(self._table.crc[row]):
                raise self._source.crc_mismatch(int(self._table.file[row]), self._begin[row], self._end[row])
            checked += self._end[row] - self._begin[row]
        return checked


def _combined(pieces: dict[tuple[int, int], int], begin: int, end: int) -> int | None:
    """The CRC-32 of bytes ``[begin, end)``; None if the pieces do not tile them."""
    at, crc = begin, 0
    for (low, high), piece in sorted(pieces.items()):
        if low != at:
            return None
        crc = combine_crc32(crc, piece, high - low)
        at = high
    return crc if at == end else None


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two byte strings one after the other, from their CRC-32s and the length of the second."""
    return second if not first else _multiply(_power_of_x(8 * length), first) ^ second


@lru_cache(maxsize=1024)  # pieces have few different lengths
def _power_of_x(exponent: int) -> int:
    """x to this power, modulo the polynomial."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
