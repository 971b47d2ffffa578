"""Read an encoded file as if it were not encoded: fetch whole frames, check and decode them.

Frames that are in files of older checkpoints are read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from typing_extensions import Buffer

from ...errors import CorruptionError, FormatError, StorageError
from ...format.checksums import checksum_of
from ...storage_backends.base import ObjectReader
from .stored_files import Fault, StoredFiles


class FrameReader(ObjectReader):
    """Reads one encoded file, whose offsets are those of its decoded bytes. For one thread.

    ``opened`` is the file itself; ``close`` closes the other files that frames were read from.
    ``scratch`` returns memory for stored bytes; several frames are read with one request if it has room for them, and
    it must have room for one. With ``on_fault``, the stored bytes of every frame are compared with their checksum
    before they are decoded, and the sizes of the other files with the manifest. A frame that cannot be decoded raises
    ``CorruptionError``.
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
        self._checksums = source.manifest.frame_checksums
        self._first, self._begin = rows.start, files.frames.begin[rows]
        self._references: dict[int, ObjectReader] = {}
        self.is_near = opened.is_near

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers`` with decoded bytes. Raises ``CorruptionError``, and ``StorageError`` if the store fails."""
        out = _Output([memoryview(buffer).cast("B") for buffer in buffers])
        low = offset - self._head
        first, last = self._covering(low, low + out.left)
        for end in self._runs(first, last):
            while first < end:
                past = self._read_in_place(first, end, out) if int(self._frames.begin[first]) >= low else first
                first = past if past > first else self._read_decoded(first, end, low, out)

    def _read_in_place(self, first: int, end: int, out: _Output) -> int:
        """Read the unencoded frames at the start of a run that fit into the next buffer; return where they end."""
        rows = slice(first, end)
        nbytes = self._frames.nbytes[rows]
        plain = int(np.argmin(np.append(self._frames.length[rows] == nbytes, False)))
        count = int(np.searchsorted(np.cumsum(nbytes[:plain]), out.room, side="right"))
        target = out.next(int(nbytes[:count].sum())) if count else None
        if target is None:
            return first
        self._read_stored(first, first + count, target)
        at = 0
        for frame, size in zip(range(first, first + count), nbytes[:count].tolist(), strict=True):
            self._is_intact(frame, target[at : at + size])
            at += size
        return first + count

    def _read_decoded(self, first: int, end: int, low: int, out: _Output) -> int:
        """Read as many frames of a run as fit into the scratch memory, and decode them; return where they end."""
        frames, scratch = self._frames, self._scratch()
        start = int(frames.position[first])
        ends = frames.position[first:end] + frames.length[first:end]
        past = first + max(1, int(np.searchsorted(ends, start + len(scratch), side="right")))
        stored = scratch[: int(ends[past - first - 1]) - start]
        self._read_stored(first, past, stored)
        at, rows = 0, slice(first, past)
        columns = (column[rows].tolist() for column in (frames.begin, frames.nbytes, frames.length))
        for frame, begin, nbytes, length in zip(range(first, past), *columns, strict=True):
            target = out.next(nbytes) if begin >= low else None
            chunk = memoryview(bytearray(nbytes)) if target is None else target
            data = stored[at : at + length]
            if self._is_intact(frame, data):
                self._decode(frame, data, chunk)
            if target is None:
                out.put(chunk[max(low - begin, 0) :])
            at += length
        return past

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether the stored bytes seem to be in this machine's memory."""
        first, last = self._covering(offset - self._head, offset - self._head + length)
        past = next(self._runs(first, last))
        start, end = self._frames.position[first], self._frames.position[past - 1] + self._frames.length[past - 1]
        return self._holder(first).is_cached(int(start), int(end - start))

    def close(self) -> None:
        """Close the files of older checkpoints."""
        while self._references:
            self._references.popitem()[1].close()

    def _holder(self, frame: int) -> ObjectReader:
        """The open file that has the frame."""
        source = int(self._frames.source[frame])
        if not source:
            return self._opened
        if source not in self._references:
            backend, key, _ = self._source.holder(self._file, source)
            try:
                self._references[source] = backend.open_object(key)
                self.is_near &= self._references[source].is_near
            except StorageError as error:
                place = self._source.frame_place(self._file, frame)
                raise self._source.read_error(self._file, *place, error, source=source) from error
        return self._references[source]

    def _runs(self, first: int, last: int) -> Iterator[int]:
        """Yield where each run of frames ``[first, last)`` ends that are back to back in one file."""
        source, position = self._frames.source[first:last], self._frames.position[first:last]
        ends = position + self._frames.length[first:last]
        yield from (np.flatnonzero((source[1:] != source[:-1]) | (position[1:] != ends[:-1])) + first + 1).tolist()
        yield last

    def _covering(self, low: int, high: int) -> tuple[int, int]:
        """The frames of bytes ``[low, high)`` of the data."""
        first, last = np.searchsorted(self._begin, [low + 1, high]).tolist()
        return self._first + first - 1, self._first + last

    def _read_stored(self, first: int, past: int, stored: memoryview) -> None:
        """Fill ``stored`` with frames that are back to back in one file."""
        holder = self._holder(first)
        try:
            holder.read(int(self._frames.position[first]), [stored])
        except StorageError as error:
            raise self._read_error(first, past, error) from error
        source = int(self._frames.source[first])
        if source and self._on_fault is not None:
            self._source.check_size(holder, self._file, self._on_fault, source=source)

    def _is_intact(self, frame: int, stored: memoryview) -> bool:
        if self._on_fault is None or checksum_of(stored) == self._checksums[frame].item():
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
        """The error for frames that cannot be read; the first one that is missing is at fault."""
        source = int(self._frames.source[first])
        ends = self._frames.position[first:past] + self._frames.length[first:past]
        size = self._source.present_size(self._file, error, source=source)
        frame = min(first + int(np.searchsorted(ends, size, side="right")), past - 1)
        row, begin, end = self._source.frame_place(self._file, frame)
        found = self._source.read_error(self._file, row, begin, end, error, source=source)
        if isinstance(found, CorruptionError):
            return found
        error.key = found.key  # ``fetch`` describes the error, as one of the file that has references
        return error


class _Output:
    """Buffers that are filled one after the other."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self.left = sum(map(len, self._views))

    @property
    def room(self) -> int:
        """Bytes of the memory that is contiguous from here."""
        return len(self._views[0]) if self._views else 0

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
