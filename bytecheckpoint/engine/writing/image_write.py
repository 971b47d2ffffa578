"""One file on its way to storage: pieces are written from any thread, hashed in order, and make a durable file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ...storage_backends.base import StorageBackend
from ...tables import Int64, ragged_positions
from ...trace import Timings
from ..files import FileImage

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
    """Writes one image in pieces that tile it. ``write_piece`` may run in many threads at once, in any order, while one
    thread hashes the same pieces in the order of the file.

    End it with ``finish`` or ``abandon``, when no thread is in ``write_piece``.
    """

    def __init__(self, backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings) -> None:
        """Begin the file. ``chunk_size`` is the number of bytes under one checksum, counted from each shard's start."""
        self._image, self._chunk_size, self._timings = image, chunk_size, timings
        self._hash = _ChunkHash(image, chunk_size)
        self._writer = backend.create(image.key, image.size)

    def write_piece(self, start: int, data: memoryview) -> None:
        """Write ``data`` at byte ``start`` of the file; it may be reused when this returns and it was hashed."""
        with self._timings.working("write", len(data)):
            self._writer.write(start, data)

    def hash_piece(self, start: int, data: memoryview) -> None:
        """Take the checksums of ``data``, which is at byte ``start`` of the file: where the piece before ended."""
        with self._timings.working("hash", len(data)):
            self._hash.update(start, data)

    def finish(self) -> WrittenFile:
        """Make the file durable, all pieces having been written and hashed."""
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
            self._hash.checksums(),
        )

    def abandon(self) -> None:
        """Leave nothing behind. Never raises."""
        self._writer.abort()


def write_whole(backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings) -> WrittenFile:
    """Write an image that is all head, and make it durable. Leaves nothing behind where that fails."""
    write = ImageWrite(backend, image, chunk_size, timings)
    try:
        data = memoryview(image.head)
        write.write_piece(0, data)
        write.hash_piece(0, data)
        return write.finish()
    except BaseException:
        write.abandon()
        raise


class _ChunkHash:
    """The checksums of an image's chunks, from its bytes in order."""

    def __init__(self, image: FileImage, chunk_size: int) -> None:
        self._starts, self._stops = _chunk_bounds(image, chunk_size)
        self._checksums = np.zeros(len(self._starts), np.uint64)
        self._size = image.size
        self._at = 0  # bytes that were fed
        self._done = 0  # chunks
        self._begun: xxhash.xxh3_64 | None = None  # the next chunk, where a part of it was fed

    def update(self, start: int, data: memoryview) -> None:
        if start != self._at:
            raise ValueError(f"bytes from {start} on, where {self._at} were hashed")
        self._at = stop = start + len(data)
        done = int(np.searchsorted(self._stops, stop, side="right"))  # with these
        first = self._done
        if self._begun is not None:
            self._begun.update(data[: int(self._stops[first]) - start])
            if done == first:
                return
            self._checksums[first] = self._begun.intdigest()
            self._begun = None
            first += 1
        begins, ends = (self._starts[first:done] - start).tolist(), (self._stops[first:done] - start).tolist()
        self._checksums[first:done] = [xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in zip(begins, ends)]
        self._done = done
        if done < len(self._starts) and self._starts[done] < stop:
            self._begun = xxhash.xxh3_64(data[int(self._starts[done]) - start :])

    def checksums(self) -> npt.NDArray[np.uint64]:
        """Of all chunks, in the order of the file, all bytes having been fed."""
        if self._at != self._size:
            raise ValueError(f"{self._at} bytes were hashed, of {self._size}")
        return self._checksums


def _chunk_bounds(image: FileImage, chunk_size: int) -> tuple[Int64, Int64]:
    """Where each chunk under a checksum begins and ends in the file, in the order of the file."""
    begins, lengths = np.array(image.offsets, np.int64) + len(image.head), np.array(image.nbytes, np.int64)
    counts = -(-lengths // chunk_size)
    starts = np.repeat(begins, counts) + ragged_positions(np.zeros_like(counts), counts) * chunk_size
    return starts, np.minimum(starts + chunk_size, np.repeat(begins + lengths, counts))
