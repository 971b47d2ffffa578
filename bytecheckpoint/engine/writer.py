"""From staging memory to durable files: several threads hash and write, one file after the other is completed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..storage_backends.base import StorageBackend
from ..tables import Int64, ragged_positions
from .arena import Slot
from .files import FileImage

__all__ = ["WrittenFile", "write_images"]

PIECE = 8 << 20  # bytes a write; large enough to reach the device's rate, small enough to share it among threads

_FILES_AT_ONCE = 2  # while one is made durable, the next one keeps the device busy


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


def write_images(
    backend: StorageBackend,
    images: Sequence[FileImage],
    slot: Slot,
    chunk_size: int,
    executor: Executor,
    point: Callable[[str], None] = lambda name: None,
) -> list[WrittenFile]:
    """Write every image and make it durable, one file being completed while the next is written.

    On any error nothing of the files that were not complete remains and the error is raised, once no thread uses the
    slot any more; files completed before are the caller's to remove.
    """
    written = []
    under_way: deque[_FileWrite] = deque()
    try:
        for image in images:
            point("write.file")
            under_way.append(_FileWrite(backend, image, slot, chunk_size, executor))
            if len(under_way) > _FILES_AT_ONCE - 1:
                written.append(under_way[0].finish(point))
                under_way.popleft()
        while under_way:
            written.append(under_way[0].finish(point))
            under_way.popleft()
    except BaseException:
        for write in under_way:
            write.abandon()
        raise
    return written


class _FileWrite:
    """One file on its way to storage: its pieces are in the executor's queue from the beginning on."""

    def __init__(
        self, backend: StorageBackend, image: FileImage, slot: Slot, chunk_size: int, executor: Executor
    ) -> None:
        self._image, self._chunk_size = image, chunk_size
        self._view = slot.view[image.place : image.place + image.size]
        self._bounds = _chunk_bounds(image, chunk_size)
        self._writer = backend.create(image.key, image.size)
        self._tasks: list[Future[list[int]]] = []
        try:
            for at in range(0, image.size, PIECE):
                self._tasks.append(executor.submit(self._write_piece, at, min(at + PIECE, image.size)))
        except BaseException:
            self.abandon()
            raise

    def finish(self, point: Callable[[str], None]) -> WrittenFile:
        """Wait until all is written, and make it durable."""
        for task in wait(self._tasks, return_when=FIRST_EXCEPTION).done:
            task.result()
        checksums = [value for task in self._tasks for value in task.result()]
        point("write.complete")
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
            np.array(checksums, np.uint64),
        )

    def abandon(self) -> None:
        """Leave nothing behind. Returns when no thread uses the slot's memory any more."""
        for task in self._tasks:
            task.cancel()
        wait(self._tasks)
        self._writer.abort()

    def _write_piece(self, start: int, stop: int) -> list[int]:
        """Write bytes ``[start, stop)`` of the file; the checksums of the chunks that begin there.

        Other threads keep the device busy while this one hashes, and it hashes many small chunks in one go.
        """
        starts, stops = self._bounds
        first, last = np.searchsorted(starts, (start, stop))
        checksums = [
            xxhash.xxh3_64_intdigest(self._view[begin:end])
            for begin, end in zip(starts[first:last].tolist(), stops[first:last].tolist())
        ]
        self._writer.write(start, self._view[start:stop])
        return checksums


def _chunk_bounds(image: FileImage, chunk_size: int) -> tuple[Int64, Int64]:
    """Where each chunk under a checksum begins and ends in the file, in the order of the file."""
    spans = np.array([(span.offset, span.nbytes) for span in image.spans], np.int64).reshape(-1, 2)
    begins, lengths = spans[:, 0] + len(image.head), spans[:, 1]
    counts = -(-lengths // chunk_size)
    starts = np.repeat(begins, counts) + ragged_positions(np.zeros_like(counts), counts) * chunk_size
    return starts, np.minimum(starts + chunk_size, np.repeat(begins + lengths, counts))
