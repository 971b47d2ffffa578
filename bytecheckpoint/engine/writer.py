"""From staging memory to durable files: several threads write and hash, one file after the other is completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..storage_backends.base import ObjectWriter, StorageBackend
from .arena import Slot
from .files import FileImage, chunk_checksums

__all__ = ["WrittenFile", "write_images"]

PIECE = 8 << 20  # bytes a write; large enough to reach the device's rate, small enough to share it among threads


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
    """Write every image and make it durable. On any error nothing of the failing file remains and the error is raised;
    files completed before it are the caller's to remove."""
    written = []
    for image in images:
        point("write.file")
        with backend.create(image.key, image.size) as writer:
            checksums = _write_one(writer, image, slot, chunk_size, executor)
            point("write.complete")
            writer.complete()
        written.append(
            WrittenFile(
                image.key,
                image.size,
                len(image.head),
                image.head_checksum(),
                chunk_size,
                image.section,
                image.kind,
                checksums,
            )
        )
    return written


def _write_one(
    writer: ObjectWriter, image: FileImage, slot: Slot, chunk_size: int, executor: Executor
) -> npt.NDArray[np.uint64]:
    view = slot.view[image.place : image.place + image.size]
    writes = [executor.submit(writer.write, at, view[at : at + PIECE]) for at in range(0, image.size, PIECE)]
    data = view[len(image.head) :]
    hashes = [
        executor.submit(chunk_checksums, data[span.offset : span.offset + span.nbytes], chunk_size)
        for span in image.spans
    ]
    # All are waited for also when one fails: the memory they use must not be given back before.
    pending: list[Future[Any]] = [*writes, *hashes]
    wait(pending)
    for write in writes:
        write.result()
    return np.array([value for future in hashes for value in future.result()], np.uint64)
