"""Compare stored bytes, as they arrive, with checksums: the manifest's, and CRC-32s of archives of ``torch.save``.

A CRC-32 covers a whole range of a file. A read fetches only what is requested, in any order and from several threads.
So each piece is hashed separately. When the pieces of a range are complete, their CRC-32s are combined; a range that
was only read in part stays unchecked.
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
from ..checksums import ChunkHasher, chunk_checksums
from .stored_files import Fault, StoredFiles


class ChunkCheck:
    """Checks the shards of one file. Each shard's bytes arrive in order, from the start of a chunk to the end of one.

    Not thread-safe; releases the GIL while it hashes.
    """

    def __init__(self, source: StoredFiles, file: int, on_fault: Fault) -> None:
        manifest = source.manifest
        self._source, self._file, self._on_fault = source, file, on_fault
        self._starts, self._nbytes = manifest.checksum_starts, manifest.shard_nbytes
        self._checksums = manifest.checksums
        self.chunk_size = int(manifest.files.chunk_size[file])
        self._partial: ChunkHasher | None = None  # set while a chunk is incomplete; counts from ``_origin``
        self._origin = 0

    def feed(self, row: int, shard: int, begin: int, data: memoryview) -> None:
        """Check ``data``, the file's bytes from ``begin`` on: part of shard ``row``, which starts at byte ``shard``."""
        start = begin - shard
        end = start + len(data)
        is_complete = end % self.chunk_size == 0 or end == self._nbytes[row]
        if is_complete and self._partial is None:
            found = chunk_checksums(data, self.chunk_size)
        else:
            if self._partial is None:
                self._partial = ChunkHasher([0], [int(self._nbytes[row]) - start], self.chunk_size)
                self._origin = start
            hasher, done = self._partial, self._partial.chunks_done
            hasher.update(start - self._origin, data)
            found = hasher.completed(slice(done, hasher.chunks_done)).tolist()
            start = self._origin + done * self.chunk_size
            if is_complete:
                self._partial = None
        if found != self._expected(row, start, len(found)):
            self._report(row, shard, start, found)

    def _expected(self, row: int, start: int, count: int) -> list[bytes]:
        first = int(self._starts[row]) + start // self.chunk_size
        expected: list[bytes] = self._checksums[first : first + count].tolist()
        return expected

    def _report(self, row: int, shard: int, start: int, found: list[bytes]) -> None:
        expected = self._expected(row, start, len(found))
        index = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
        begin = shard + start + index * self.chunk_size
        end = min(begin + self.chunk_size, shard + int(self._nbytes[row]))
        self._on_fault(row, self._source.mismatch(self._file, row, begin, end))


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
        for row, (file, begin) in enumerate(zip(self.file.tolist(), self.begin.tolist(), strict=True)):
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
