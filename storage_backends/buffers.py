"""Buffers as bytes, and which bytes of an object being written have arrived."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from typing_extensions import Buffer

from ..errors import StorageError

__all__ = ["PieceMap", "behind", "byte_view"]


def byte_view(data: Buffer) -> memoryview:
    """``data`` as a flat view of its bytes, without a copy. Raises ``StorageError`` where it is not contiguous."""
    view = memoryview(data)
    if view.nbytes == 0:
        # An array with a zero in its shape cannot be cast; there is nothing to share with it either.
        return memoryview(b"" if view.readonly else bytearray())
    if not view.c_contiguous:
        raise StorageError("a buffer to write from or read into must be contiguous")
    return view.cast("B")


def behind(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """What of ``buffers``, seen as one after the other, comes after the first ``length`` bytes."""
    for index, buffer in enumerate(buffers):
        if length < len(buffer):
            return [buffer[length:], *buffers[index + 1 :]]
        length -= len(buffer)
    return []


class PieceMap:
    """The part of ``[0, size)`` that was written, as merged intervals. Not thread-safe: a writer holds its lock.

    Pieces mostly arrive in order, or in a few orders interleaved, so the list of intervals stays short.
    """

    def __init__(self, where: str, size: int) -> None:
        if size < 0:
            raise StorageError(f"{where}: the size of an object cannot be {size}")
        self._where = where
        self._size = size
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, length: int) -> None:
        """Record one piece. Raises ``StorageError`` where it leaves the object or overlaps an earlier piece."""
        end = offset + length
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._where}: bytes [{offset}, {end}) are outside an object of {self._size} bytes")
        if length == 0:
            return
        at = bisect_right(self._starts, offset)
        before = at > 0 and self._ends[at - 1] > offset
        after = at < len(self._starts) and self._starts[at] < end
        if before or after:
            raise StorageError(f"{self._where}: bytes [{offset}, {end}) overlap a piece that was written before")
        joins_left = at > 0 and self._ends[at - 1] == offset
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = offset
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)

    def check_whole(self) -> None:
        """Raise ``StorageError``, naming the first hole, unless every byte has arrived."""
        if self._size == 0:
            return
        if not self._starts or self._starts[0] > 0:
            hole = (0, self._starts[0] if self._starts else self._size)
        elif self._ends[0] < self._size:
            hole = (self._ends[0], self._starts[1] if len(self._starts) > 1 else self._size)
        else:
            return
        raise StorageError(f"{self._where}: bytes [{hole[0]}, {hole[1]}) of {self._size} were never written")
