"""Read many short ranges of one object with few requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...runtime.threads import Threads
from ...storage_backends.base import ObjectReader

_GAP = 32 << 10  # bytes between two ranges that are read rather than skipped
_EXTENT = 8 << 20  # bytes of one request
_THREADS = 8
_TAIL = 32 << 10  # bytes at the end of an archive that are read first

Positions = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


def read_rows(reader: ObjectReader, starts: Positions, width: int) -> Rows:
    """Return ranges of one width, one row each. Ranges may overlap, and have any order.

    Raises ``StorageError`` if the object ends before a range does.
    """
    rows = np.empty((len(starts), width), np.uint8)
    if not len(starts) or not width:
        return rows
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    is_first = np.ones(len(starts), bool)
    is_first[1:] = (np.diff(ordered) > width + _GAP) | (np.diff(ordered // _EXTENT) != 0)
    bounds = [*np.flatnonzero(is_first).tolist(), len(starts)]

    def read(first: int, last: int) -> None:
        begin = int(ordered[first])
        extent = np.empty(int(ordered[last - 1]) + width - begin, np.uint8)
        reader.read(begin, [extent.data])
        every = np.lib.stride_tricks.sliding_window_view(extent, width)
        rows[order[first:last]] = every[ordered[first:last] - begin]

    if len(bounds) == 2:
        read(*bounds)
    else:
        with Threads(_THREADS, "bcp-index") as pool:
            list(pool.map(read, bounds[:-1], bounds[1:]))
    return rows


class ByteWindow:
    """The bytes ``[base, base + length)`` of an object, addressed from 0. The end is read once."""

    def __init__(self, reader: ObjectReader, base: int, length: int, where: str) -> None:
        self.reader = reader
        self.base = base
        self.length = length
        self.where = where
        self._tail = b""

    def read(self, start: int, count: int) -> bytes:
        """Return bytes. Raises ``FormatError`` if they are not inside the window."""
        if start < 0 or count < 0 or start + count > self.length:
            raise FormatError(f"{self.where}: bytes {start} to {start + count} are outside of its {self.length} bytes")
        if not self._tail and start + count > self.length - _TAIL:
            self._tail = self._fetch(max(self.length - _TAIL, 0), min(_TAIL, self.length))
        tail_start = self.length - len(self._tail)
        if start >= tail_start:
            return self._tail[start - tail_start : start - tail_start + count]
        return self._fetch(start, count)

    def read_rows(self, starts: Positions, width: int) -> Rows:
        """Return ranges of one width. Raises ``FormatError`` if one is not inside the window."""
        if len(starts) and (int(starts.min()) < 0 or int(starts.max()) > self.length - width):
            raise FormatError(f"{self.where}: an entry begins outside of its {self.length} bytes")
        tail_start = self.length - len(self._tail)
        if self._tail and len(starts) and int(starts.min()) >= tail_start:
            every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(self._tail, np.uint8), width)
            found: Any = every[starts - tail_start]
            return np.ascontiguousarray(found, np.uint8)
        return read_rows(self.reader, starts + self.base, width)

    def _fetch(self, start: int, count: int) -> bytes:
        buffer = bytearray(count)
        if count:
            self.reader.read(self.base + start, [buffer])
        return bytes(buffer)
