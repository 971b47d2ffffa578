"""Read an encoded file as if it were not encoded: fetch whole frames, check and decode them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from ...errors import CorruptionError, FormatError, StorageError
from ...storage_backends.base import ObjectReader
from .stored_files import Fault, StoredFiles

__all__ = ["FrameReader"]


class FrameReader(ObjectReader):
    """Reads one encoded file, whose offsets are those of its decoded bytes. For one thread.

    ``scratch`` returns memory for stored bytes; several frames are read with one request if it has room for them, and
    it must have room for one. With ``on_fault``, the stored bytes of every frame are compared with their checksum
    before they are decoded. A frame that cannot be decoded raises ``CorruptionError``.
    """

    def __init__(
        self,
        source: StoredFiles,
        file: int,
        opened: ObjectReader,
        scratch: Callable[[], memoryview],
        on_fault: Fault | None,
    ) -> None:
        files = source.manifest.files
        assert files.frames is not None
        self._source, self._file, self._opened = source, file, opened
        self._scratch, self._on_fault = scratch, on_fault
        self._codec = source.codec(file)
        self._head = int(files.head_length[file])
        self._frames, rows = files.frames, files.frames.rows(file)
        self._first, self._begin = rows.start, files.frames.begin[rows]

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers`` with decoded bytes. Raises ``CorruptionError``, and ``StorageError`` if the store fails."""
        out = _Output([memoryview(buffer).cast("B") for buffer in buffers])
        low = offset - self._head
        first, last = self._covering(low, low + out.left)
        for batch, stored in self._fetch(first, last):
            at = 0
            columns = (self._frames.begin, self._frames.nbytes, self._frames.length)
            for frame, begin, nbytes, length in zip(
                range(batch.start, batch.stop), *(column[batch].tolist() for column in columns)
            ):
                target = out.next(nbytes) if begin >= low else None
                chunk = memoryview(bytearray(nbytes)) if target is None else target
                data = stored[at : at + length]
                if self._is_intact(frame, data):
                    self._decode(frame, data, chunk)
                if target is None:
                    out.put(chunk[max(low - begin, 0) :])
                at += length

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether the stored bytes seem to be in this machine's memory."""
        first, last = self._covering(offset - self._head, offset - self._head + length)
        start, end = self._frames.position[first], self._frames.position[last - 1] + self._frames.length[last - 1]
        return self._opened.is_cached(int(start), int(end - start))

    def _covering(self, low: int, high: int) -> tuple[int, int]:
        """The frames of bytes ``[low, high)`` of the data."""
        first, last = np.searchsorted(self._begin, [low + 1, high]).tolist()
        return self._first + first - 1, self._first + last

    def _fetch(self, first: int, last: int) -> Iterator[tuple[slice, memoryview]]:
        """Yield frames ``[first, last)`` in order, as many with their stored bytes as fit into the scratch memory."""
        frames, scratch = self._frames, self._scratch()
        while first < last:
            start = int(frames.position[first])
            ends = frames.position[first:last] + frames.length[first:last]
            past = first + max(1, int(np.searchsorted(ends, start + len(scratch), side="right")))
            stored = scratch[: int(ends[past - first - 1]) - start]
            try:
                self._opened.read(start, [stored])
            except StorageError as error:
                raise self._read_error(first, past, error) from error
            yield slice(first, past), stored
            first = past

    def _is_intact(self, frame: int, stored: memoryview) -> bool:
        if self._on_fault is None or xxh3_64_intdigest(stored) == int(self._frames.checksum[frame]):
            return True
        self._on_fault(*self._source.frame_fault(self._file, frame, "checksum mismatch"))
        return False

    def _decode(self, frame: int, stored: memoryview, out: memoryview) -> None:
        try:
            if len(stored) == len(out):
                np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(stored, np.uint8))
            else:
                self._codec.decode(stored, out)
        except FormatError as error:
            raise self._source.frame_fault(self._file, frame, f"undecodable frame ({error})")[1] from error

    def _read_error(self, first: int, past: int, error: StorageError) -> CorruptionError | StorageError:
        """The error for frames that cannot be read, of which the first that is not there is at fault."""
        ends = self._frames.position[first:past] + self._frames.length[first:past]
        size = self._source.present_size(self._file)
        frame = min(first + int(np.searchsorted(ends, size, side="right")), past - 1)
        row, begin, end = self._source.frame_place(self._file, frame)
        found = self._source.read_error(self._file, row, begin, end, error)
        return found if isinstance(found, CorruptionError) else error


class _Output:
    """Buffers that are filled one after the other."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self.left = sum(map(len, self._views))

    def next(self, nbytes: int) -> memoryview | None:
        """Return the memory for the next bytes if it is contiguous; it counts as filled then."""
        if not self._views or len(self._views[0]) < nbytes:
            return None
        found = self._views[0][:nbytes]
        self._advance(nbytes)
        return found

    def put(self, data: memoryview) -> None:
        """Copy the next bytes; those after the last buffer are dropped."""
        while len(data) and self._views:
            count = min(len(data), len(self._views[0]))
            np.copyto(np.frombuffer(self._views[0], np.uint8)[:count], np.frombuffer(data, np.uint8)[:count])
            self._advance(count)
            data = data[count:]

    def _advance(self, count: int) -> None:
        rest = self._views[0][count:]
        self._views[:1] = [rest] if len(rest) else []
