"""Views of buffers as bytes, and the ranges of an object that have been written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from typing_extensions import Buffer

from ..errors import StorageError


def byte_view(data: Buffer) -> memoryview:
    """Return a flat view of the bytes of a buffer, without a copy.

    Args:
        data: A contiguous buffer of any shape and element type.

    Returns:
        A 1-D view of unsigned bytes, writable if ``data`` is. It keeps ``data`` alive.

    Raises:
        StorageError: ``data`` is not contiguous.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        # An array with a zero in its shape cannot be cast.
        return memoryview(b"" if view.readonly else bytearray())
    if not view.c_contiguous:
        raise StorageError("a buffer to write from or read into must be contiguous")
    return view.cast("B")


def writable_view(action: str, buffer: Buffer) -> memoryview:
    """Return ``byte_view`` of a buffer to read into. Raises ``StorageError`` if it is read-only."""
    view = byte_view(buffer)
    if view.readonly:
        raise StorageError(f"{action}: the buffer to read into is read-only")
    return view


def check_max_size(action: str, size: int, max_size: int | None) -> None:
    """Raise ``StorageError`` if an object of ``size`` bytes is larger than ``max_size``."""
    if max_size is not None and size > max_size:
        raise StorageError(f"{action}: it has {size} bytes, at most {max_size} were expected")


def skip_bytes(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """Return what follows the first ``length`` bytes of ``buffers``, which form one sequence of bytes."""
    for index, buffer in enumerate(buffers):
        if length < len(buffer):
            return [buffer[length:], *buffers[index + 1 :]]
        length -= len(buffer)
    return []


class WrittenRanges:
    """The ranges of an object that have been written, as merged intervals. Not thread-safe.

    A backend uses it to reject overlapping writes, and to check before it publishes an object that every byte was
    written. Ranges mostly arrive in order, or in a few interleaved orders, so the list of intervals stays short.

    Args:
        where: The object's address, for error messages.
        size: The size of the object in bytes.

    Raises:
        StorageError: ``size`` is negative.

    Example:
        >>> written = WrittenRanges("s3://bucket/key", 8)
        >>> written.add(0, 4)
        >>> written.check_whole()
        Traceback (most recent call last):
            ...
        StorageError: s3://bucket/key: bytes [4, 8) of 8 were never written
    """

    def __init__(self, where: str, size: int) -> None:
        if size < 0:
            raise StorageError(f"{where}: the size of an object cannot be {size}")
        self._where = where
        self._size = size
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, length: int) -> None:
        """Record a range.

        Args:
            offset: The first byte.
            length: The number of bytes; 0 records nothing.

        Raises:
            StorageError: The range exceeds the object or overlaps an earlier range.
        """
        end = offset + length
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._where}: bytes [{offset}, {end}) are outside an object of {self._size} bytes")
        if length == 0:
            return
        at = bisect_right(self._starts, offset)
        before = at > 0 and self._ends[at - 1] > offset
        after = at < len(self._starts) and self._starts[at] < end
        if before or after:
            raise StorageError(f"{self._where}: bytes [{offset}, {end}) overlap a range that was written before")
        left = at > 0 and self._ends[at - 1] == offset
        right = at < len(self._starts) and self._starts[at] == end
        self._starts[at : at + right] = [] if left else [offset]
        self._ends[at - left : at] = [] if right else [end]

    def shrink(self, size: int) -> None:
        """Change the size of the object.

        Args:
            size: The new size.

        Raises:
            StorageError: It exceeds the old one, or bytes after it have been written.
        """
        if not (self._ends[-1] if self._ends else 0) <= size <= self._size:
            raise StorageError(f"{self._where}: an object of {self._size} bytes cannot be shortened to {size}")
        self._size = size

    def check_whole(self) -> None:
        """Check that every byte has been written.

        Raises:
            StorageError: Bytes are missing; the message names the first missing range.
        """
        start = self._ends[0] if self._starts[:1] == [0] else 0
        if start < self._size:
            end = next((one for one in self._starts if one > start), self._size)
            raise StorageError(f"{self._where}: bytes [{start}, {end}) of {self._size} were never written")
