"""One file on its way to storage: pieces come in from any thread, are hashed and written, and make a durable file."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..storage_backends.base import StorageBackend
from ..tables import Int64, ragged_positions
from ..trace import Timings
from .files import FileImage

__all__ = ["ImageWrite", "WrittenFile", "write_whole"]


@dataclass(frozen=True)
class WrittenFile:
    """What the manifest needs to know of a durable file. ``checksums`` run over its shards in file order."""

    key: str
    size: int
    head_length: int
    head_checksum: int
    chunk_size: int
    section: str
    kind: str
    checksums: npt.NDArray[np.uint64]

    def to_plain(self) -> list[Any]:
        """As plain data, for the way to rank 0."""
        return [
            self.key,
            self.size,
            self.head_length,
            self.head_checksum,
            self.chunk_size,
            self.section,
            self.kind,
            self.checksums.astype("<u8").tobytes(),
        ]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> WrittenFile:
        key, size, head_length, head_checksum, chunk_size, section, kind, checksums = plain
        column = np.frombuffer(checksums, "<u8").astype(np.uint64)
        return cls(key, size, head_length, head_checksum, chunk_size, section, kind, column)


class ImageWrite:
    """Writes one image in pieces that tile it. ``write_piece`` may run in many threads at once, as long as the pieces
    are begun in file order: a checksum that runs over the end of a piece is handed from each to the next.

    End it with ``finish`` or ``abandon``, when no thread is in ``write_piece`` (``abandon`` makes those that wait for
    each other fail; await them between ``fail`` and ``abandon``).
    """

    def __init__(self, backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings) -> None:
        """Begin the file. ``chunk_size`` is the number of bytes under one checksum, counted from each shard's start."""
        self._image, self._chunk_size, self._timings = image, chunk_size, timings
        self._starts, self._stops = _chunk_bounds(image, chunk_size)
        self._checksums = np.zeros(len(self._starts), np.uint64)
        self._carried = _Carried()
        self._writer = backend.create(image.key, image.size)

    def write_piece(self, start: int, data: memoryview) -> None:
        """Write ``data`` at byte ``start`` of the file; it may be reused when this returns."""
        stop = start + len(data)
        first = int(np.searchsorted(self._starts, start))
        # The rest of a checksum that began in the piece before: after the write, when it was handed on long ago.
        rest = min(max(int(self._stops[first - 1]), start) if first else start, stop) - start
        try:
            # Other threads keep the device busy while this one hashes what it is about to write.
            with self._timings.working("hash", len(data) - rest):
                self._hash_begun(first, start, data)
            with self._timings.working("write", len(data)):
                self._writer.write(start, data)
            if rest:
                with self._timings.working("hash", rest):
                    self._hash_rest(first - 1, start, data[:rest])
        except BaseException as error:
            self.fail(error)
            raise

    def finish(self) -> WrittenFile:
        """Make the file durable, all pieces having been written."""
        with self._timings.working("sync"):
            self._writer.complete()
        image = self._image
        return WrittenFile(
            image.key,
            image.size,
            len(image.head),
            image.head_checksum(),
            self._chunk_size,
            image.section,
            image.kind,
            self._checksums,
        )

    def fail(self, error: BaseException) -> None:
        """No further piece will come: those that wait for one raise ``error``."""
        self._carried.fail(error)

    def abandon(self) -> None:
        """Leave nothing behind. Never raises."""
        self._writer.abort()

    def _hash_begun(self, first: int, start: int, data: memoryview) -> None:
        """The checksums, from ``first`` on, that begin in this piece. What goes on in the next is handed on first."""
        stop = start + len(data)
        last = whole = int(np.searchsorted(self._starts, stop))
        if last > first and self._stops[last - 1] > stop:
            whole -= 1
            self._carried.hand_on(stop, xxhash.xxh3_64(data[int(self._starts[whole]) - start :]))
        if whole > first:
            begins, ends = (self._starts[first:whole] - start).tolist(), (self._stops[first:whole] - start).tolist()
            self._checksums[first:whole] = [
                xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in zip(begins, ends)
            ]

    def _hash_rest(self, row: int, start: int, data: memoryview) -> None:
        """The rest of the checksum ``row``, or what of it is in this piece."""
        hasher = self._carried.take(start)
        hasher.update(data)
        stop = start + len(data)
        if self._stops[row] > stop:
            self._carried.hand_on(stop, hasher)
        else:
            self._checksums[row] = hasher.intdigest()


def write_whole(backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings) -> WrittenFile:
    """Write an image that is all head, and make it durable. Leaves nothing behind where that fails."""
    write = ImageWrite(backend, image, chunk_size, timings)
    try:
        write.write_piece(0, memoryview(image.head))
        return write.finish()
    except BaseException:
        write.abandon()
        raise


class _Carried:
    """Checksums that are not complete yet, by the byte of the file up to which they run. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._hashers: dict[int, xxhash.xxh3_64] = {}
        self._failure: BaseException | None = None

    def hand_on(self, at: int, hasher: xxhash.xxh3_64) -> None:
        with self._changed:
            self._hashers[at] = hasher
            self._changed.notify_all()

    def take(self, at: int) -> xxhash.xxh3_64:
        """Waits for it; ends because pieces are begun in order. Raises what an earlier piece failed with."""
        with self._changed:
            self._changed.wait_for(lambda: at in self._hashers or self._failure)
            if at in self._hashers:
                return self._hashers.pop(at)
            assert self._failure is not None
            raise self._failure

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def _chunk_bounds(image: FileImage, chunk_size: int) -> tuple[Int64, Int64]:
    """Where each chunk under a checksum begins and ends in the file, in the order of the file."""
    begins, lengths = np.array(image.offsets, np.int64) + len(image.head), np.array(image.nbytes, np.int64)
    counts = -(-lengths // chunk_size)
    starts = np.repeat(begins, counts) + ragged_positions(np.zeros_like(counts), counts) * chunk_size
    return starts, np.minimum(starts + chunk_size, np.repeat(begins + lengths, counts))
