"""Read ranges of a checkpoint's files, and check every byte before it is passed on."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from ..engine.checksums import chunk_bounds
from ..engine.reading.stored_files import StoredFiles, read_stored_file, source_after
from ..errors import CheckpointError, CorruptionError, StorageError
from ..format.checksums import Checksums, checksum_of
from ..format.manifest.document import Manifest
from ..storage_backends.base import StorageBackend
from ..tensors.tables import Int64, ragged_positions

_PIECE_BYTES = 1 << 20  # of the bytes around a range, which are hashed and not kept


@dataclass(frozen=True)
class _Spans:
    """The spans of a file, which tile it, in the order of their bytes.

    Attributes:
        start: The first byte of each span.
        stop: The byte after its last one.
        checksum: That of its bytes.
        row: The row of its shard; -1 for the head.
        frame: Its row of ``FrameTable``; -1 for the head and in a file that is not encoded.
        source: Which file has its bytes (``FrameTable``).
        position: Its first byte there.
    """

    start: Int64
    stop: Int64
    checksum: Checksums
    row: Int64
    frame: Int64
    source: Int64
    position: Int64

    @classmethod
    def of(cls, manifest: Manifest, file: int, *, own_only: bool) -> _Spans:
        """``own_only`` leaves out the frames that other files have."""
        files, rows, frames = manifest.files, manifest.shards_in(file), manifest.files.frames
        head, chunk_size = int(files.head_length[file]), int(files.chunk_size[file])
        if files.codec[file] == "raw":
            starts, stops = chunk_bounds(head + manifest.shard_offset[rows], manifest.shard_nbytes[rows], chunk_size)
            first = manifest.checksum_starts[rows]
            counts = manifest.checksum_starts[rows + 1] - first
            checksums, rows = manifest.checksums[ragged_positions(first, counts)], np.repeat(rows, counts)
            frame, source, position = np.full_like(rows, -1), np.zeros_like(rows), starts
        else:
            assert frames is not None
            here = frames.rows(file)
            frame = np.arange(here.start, here.stop)
            if own_only:
                frame = frame[frames.source[frame] == 0]
            stops = head + np.cumsum(frames.length[frame])
            starts, checksums = stops - frames.length[frame], manifest.frame_checksums[frame]
            rows = rows[manifest.shard_nbytes[rows] > 0]
            rows = rows[np.searchsorted(manifest.shard_offset[rows], frames.begin[frame], side="right") - 1]
            source, position = frames.source[frame], frames.position[frame]
        if not head:
            return cls(starts, stops, checksums, rows, frame, source, position)
        return cls(
            np.append(0, starts),
            np.append(head, stops),
            np.concatenate([files.head_checksum[file : file + 1], checksums]),
            np.append(-1, rows),
            np.append(-1, frame),
            np.append(0, source),
            np.append(0, position),
        )

    def within(self, begin: int, end: int) -> slice:
        """Return the spans that have bytes of ``[begin, end)``."""
        return slice(int(np.searchsorted(self.stop, begin, side="right")), int(np.searchsorted(self.start, end)))


class SourceFile:
    """One file of a committed checkpoint. Thread-safe.

    An encoded file is read as if it had all of its frames itself, or with ``keeps_references`` as it is.

    A checksum covers a *span*: the head of the file, or one chunk of a tensor, or the frame of one in an encoded file.
    A range, which is one part of the file, may begin or end inside a span. Such a span is read as a whole first, and
    only hashed; what is compared for each of its parts is then its checksum in that pass.
    """

    def __init__(
        self, backend: StorageBackend, manifest: Manifest, file: int, part_bytes: int, *, keeps_references: bool
    ) -> None:
        self._source, self._file = StoredFiles(backend, manifest), file
        self._part_bytes = part_bytes
        self._divided: dict[int, dict[int, bytes]] = {}  # spans: the checksums of their parts, by the first byte
        self._hashing: dict[int, threading.Lock] = {}  # by span
        self._key = manifest.files.name[file]
        self._spans = _Spans.of(manifest, file, own_only=keeps_references)

    def read(self, begin: int, view: memoryview) -> None:
        """Fill ``view`` with the file's bytes from ``begin`` on, one part.

        Raises ``CorruptionError`` if they, or the rest of a span that they are part of, differ from what was saved, and
        ``StorageError`` if the store fails: from the other copy too, where there is one (``source_after``).
        """
        if not len(view):
            return
        try:
            self._read(begin, view)
        except (CorruptionError, StorageError) as error:
            other = source_after(self._source.backend, error)
            if other is None:
                raise
            again = copy(self)
            again._source = StoredFiles(other, self._source.manifest)
            again._read(begin, view)

    def _read(self, begin: int, view: memoryview) -> None:
        end = begin + len(view)
        here = self._spans.within(begin, end)
        first, last = here.start, here.stop
        try:
            self._fill(begin, view)
            for span in {first, last - 1}:
                if self._spans.start[span] < begin or self._spans.stop[span] > end:
                    self._check_across(span, begin, view)
        except CheckpointError:
            raise
        except StorageError as error:
            raise self._unreadable(begin, end, error) from error
        inside = range(first + (self._spans.start[first] < begin), last - (self._spans.stop[last - 1] > end))
        bad = self._find_damage(inside, begin, view)
        if bad is not None:
            raise self._damage(bad)

    def _find_damage(self, spans: range, begin: int, view: memoryview) -> int | None:
        """Return the first of the spans whose checksum differs; all of them are complete in ``view``."""
        here, found = slice(spans.start, spans.stop), self._spans
        starts, stops = (found.start[here] - begin).tolist(), (found.stop[here] - begin).tolist()
        for span, start, stop, expected in zip(spans, starts, stops, found.checksum[here].tolist(), strict=True):
            if checksum_of(view[start:stop]) != expected:
                return span
        return None

    def _check_across(self, span: int, begin: int, view: memoryview) -> None:
        """Check a span that is partly outside ``view``."""
        start, stop = int(self._spans.start[span]), int(self._spans.stop[span])
        low, high = max(start, begin), min(stop, begin + len(view))
        with self._hashing.setdefault(span, threading.Lock()):
            if span not in self._divided:
                self._divided[span] = self._hash_parts(span)
        if xxhash.xxh3_128_digest(view[low - begin : high - begin]) != self._divided[span][low]:
            raise self._damage(span)

    def _hash_parts(self, span: int) -> dict[int, bytes]:
        """Check a span, and return the checksum of each part of it, by its first byte."""
        start, stop = int(self._spans.start[span]), int(self._spans.stop[span])
        whole, memory = xxhash.xxh3_128(), memoryview(bytearray(min(_PIECE_BYTES, stop - start)))
        parts: dict[int, xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)
        at = start
        while at < stop:
            part = at // self._part_bytes * self._part_bytes
            piece = memory[: min(stop, part + self._part_bytes) - at]
            self._fill(at, piece)
            whole.update(piece)
            parts[max(start, part)].update(piece)
            at += len(piece)
        if whole.digest() != self._spans.checksum[span].item():
            raise self._damage(span)
        return {first: one.digest() for first, one in parts.items()}

    def _fill(self, begin: int, view: memoryview) -> None:
        for source, at, part in self._places(begin, view):
            backend, key, _ = self._source.holder(self._file, source)
            try:
                backend.read_into(key, at, part)
            except StorageError as error:
                if not source:
                    raise
                raise self._unreadable_frame(source, at, error) from error

    def _places(self, begin: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Divide a range by the files that have it: a source (``FrameTable``), the first byte there, and the memory."""
        here = self._spans.within(begin, begin + len(view))
        start, source = np.maximum(self._spans.start[here], begin), self._spans.source[here]
        at = self._spans.position[here] + start - self._spans.start[here]
        # Spans that are back to back in one file too are read together.
        apart = (source[1:] != source[:-1]) | (np.diff(at) != np.diff(start))
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(start)]
        starts = [*(start - begin).tolist(), len(view)]
        for first, past in pairwise(edges):
            yield int(source[first]), int(at[first]), view[starts[first] : starts[past]]

    def _unreadable_frame(self, source: int, at: int, error: StorageError) -> CheckpointError | StorageError:
        """Return the error for frames from byte ``at`` of another file; the first one that is missing is at
        fault."""
        found, size = self._spans, self._source.present_size(self._file, error, source=source)
        inside = np.flatnonzero((found.source == source) & (found.position >= at))
        beyond = inside[(found.position + found.stop - found.start)[inside] > size]
        place = self._source.frame_place(self._file, int(found.frame[(beyond if len(beyond) else inside)[0]]))
        return self._source.read_error(self._file, *place, error, source=source)

    def _unreadable(self, begin: int, end: int, error: StorageError) -> CheckpointError | StorageError:
        """Return the error for a range that cannot be read, which names a tensor in it."""
        at = int(np.searchsorted(self._spans.stop, begin, side="right"))
        row = int(self._spans.row[at])
        if row >= 0:
            return self._source.read_error(self._file, row, begin, end, error)
        return self._head_error() or error

    def _damage(self, span: int) -> CheckpointError | StorageError:
        """Return the error for a span that differs from what was saved."""
        row, begin, end = int(self._spans.row[span]), int(self._spans.start[span]), int(self._spans.stop[span])
        frame = int(self._spans.frame[span])
        if frame >= 0:
            return self._source.frame_fault(self._file, frame, "checksum mismatch")[1]
        if row >= 0:
            return self._source.mismatch(self._file, row, begin, end)
        return self._head_error() or CorruptionError(
            f"{self._source.backend.url}/{self._key}: bytes [{begin}, {end}) change between two reads", key=self._key
        )

    def _head_error(self) -> CheckpointError | StorageError | None:
        try:
            read_stored_file(self._source.backend, self._source.manifest, self._file, head_only=False)
        except (CheckpointError, StorageError) as error:
            return error
        return None
