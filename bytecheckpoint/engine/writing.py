"""Write files: threads of an executor write pieces, while the thread that submits them hashes them in file order.

A thread that writes sleeps while the device works, so several cost little processor time. Hashing, and copying in a
synchronous save, happen on the one thread that submits the pieces: it is much faster than storage, and it does not
compete for the GIL with copies of itself. Encoding is slower than storage, so the threads that write do it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from ..codecs import find_codec
from ..errors import StorageFullError
from ..format.checksums import Checksums, checksum_of, empty_checksums
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from .checksums import ChunkHasher
from .encoding import ChunkEncoder, Frames, Release, UnencodedPiece
from .files import FileImage
from .staging.staging import Staging

_MAX_OPEN_FILES = 2  # while one file is made durable, the next one keeps the device busy


@dataclass(frozen=True)
class WrittenFile:
    """What the manifest records about a durable file.

    ``checksums`` cover its tensors in file order; ``frames`` are those of an encoded file.
    """

    key: str
    size: int
    head_length: int
    head_checksum: bytes
    chunk_size: int
    section: str
    kind: str
    checksums: Checksums
    frames: Frames | None = None

    @classmethod
    def of(
        cls, image: FileImage, chunk_size: int, checksums: Checksums, encoded: tuple[int, Frames] | None = None
    ) -> WrittenFile:
        """Describe a durable file with the content of ``image``; if it is ``encoded``, with this size and frames."""
        size, frames = (image.size, None) if encoded is None else encoded
        return cls(
            image.key,
            size,
            len(image.head),
            checksum_of(image.head),
            chunk_size,
            image.section,
            image.kind,
            checksums,
            frames,
        )


class FileWriter:
    """Writes one file from pieces that tile it. Call ``write``, then ``finish`` or ``abandon``, from one thread."""

    def __init__(
        self, backend: StorageBackend, image: FileImage, chunk_size: int, executor: Executor, timings: Timings
    ) -> None:
        """Create the file. Each ``chunk_size`` bytes of a tensor get one checksum."""
        self._image, self._chunk_size = image, chunk_size
        self._executor, self._timings = executor, timings
        self._hasher = ChunkHasher([len(image.head) + offset for offset in image.offsets], image.nbytes, chunk_size)
        self._writes: list[tuple[Future[None], Release]] = []
        self._has_failed = False
        self._encoder = None
        if image.codec != "raw":
            self._encoder = ChunkEncoder(image, chunk_size, find_codec(image.codec), self._hasher)
        if image.shared is not None:
            assert image.base is not None
            self._hasher.assume(image.shared, image.base.checksum)
        nbytes = sum(end - begin for begin, end in image.staged_ranges())
        self._writer = backend.create(image.key, nbytes, at_most=self._encoder is not None)

    def write(self, start: int, data: memoryview, release: Release = lambda: None) -> None:
        """Hash ``data``, the bytes of the file from ``start`` on, and queue the write of them.

        They follow the last ones, or the gap of the image after those.
        The frames of an encoded file overwrite ``data``, and are written from there. ``release`` is called when the
        piece is written or its write has failed or is abandoned, also if this method raises. Raises the failure of an
        earlier write.
        """
        release = partial(_call_once, [release])
        try:
            self._raise_failure()
            self._pass_gap(start)
            with self._timings.measure("hash", len(data)):
                self._hasher.update(start, data)
            if self._encoder is None:
                task = self._executor.submit(self._write_piece, start, [data], release)
            elif (piece := self._encoder.cut(start, data, release)) is not None:
                task = self._executor.submit(self._encode_piece, self._encoder, piece)
            else:
                return
            self._writes.append((task, release))
        except BaseException:
            release()
            raise

    def _pass_gap(self, stop: int) -> None:
        """Do the same as ``write`` for the bytes before ``stop``, which the base has."""
        start = self._hasher.position
        if start == stop or self._encoder is None:
            return
        self._hasher.skip(stop - start)
        piece = self._encoder.cut(start, memoryview(b""), lambda: None, stop - start)
        if piece is not None:
            self._writes.append((self._executor.submit(self._encode_piece, self._encoder, piece), lambda: None))

    def wait(self) -> None:
        """Wait until all of the file is written. Raises the first failure."""
        self._pass_gap(self._image.size)
        wait([task for task, _ in self._writes], return_when=FIRST_EXCEPTION)
        self._raise_failure()

    def finish(self) -> WrittenFile:
        """Make the file durable. All its pieces must be written (``wait``)."""
        checksums = self._hasher.checksums()
        encoded = None if self._encoder is None else self._encoder.finish()
        if encoded is not None:
            self._writer.shrink(encoded[0])
        with self._timings.measure("sync"):
            self._writer.complete()
        return WrittenFile.of(self._image, self._chunk_size, checksums, encoded)

    def abandon(self) -> None:
        """Remove the file. Returns when no thread uses the memory of a piece. Never raises."""
        wait([task for task, _ in self._writes if not task.cancel()])
        for _, release in self._writes:
            release()
        self._writer.abort()

    def _encode_piece(self, encoder: ChunkEncoder, piece: UnencodedPiece) -> None:
        """Encode a piece, and write all pieces whose place is known then."""
        try:
            with self._timings.measure("encode", len(piece.data)):
                placed = encoder.encode(piece)
        except BaseException:
            self._has_failed = True
            raise
        for one in placed:
            self._write_piece(one.offset, one.parts, one.release)

    def _write_piece(self, start: int, parts: Iterable[memoryview], release: Release) -> None:
        try:
            for part in parts:
                with self._timings.measure("write", len(part)):
                    self._writer.write(start, part)
                start += len(part)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            release()

    def _raise_failure(self) -> None:
        if self._has_failed:
            for task, _ in self._writes:
                if task.done():
                    task.result()


def _call_once(pending: list[Release]) -> None:
    with suppress(IndexError):
        pending.pop()()


@dataclass(eq=False)
class FileSequence:
    """Writes files one after the other; makes one durable while the next is being written.

    Use it as a context manager. If the block raises, incomplete files are removed and no thread uses a piece's memory
    any more. Removing complete files is up to the caller. ``point`` is called with "file" before a file is created and
    "complete" before it is made durable.
    """

    backend: StorageBackend
    chunk_size: int
    executor: Executor
    timings: Timings
    point: Callable[[str], None]
    _open: deque[FileWriter] = field(default_factory=deque, init=False)
    _written: list[WrittenFile] = field(default_factory=list, init=False)

    def create(self, image: FileImage) -> FileWriter:
        """Create the next file. The file before the last one is completed first."""
        if len(self._open) == _MAX_OPEN_FILES:
            self._finish_first()
        self.point("file")
        writer = FileWriter(self.backend, image, self.chunk_size, self.executor, self.timings)
        self._open.append(writer)
        return writer

    def finish(self) -> list[WrittenFile]:
        """Complete all files that are still open; return every file, in order."""
        while self._open:
            self._finish_first()
        return self._written

    def _finish_first(self) -> None:
        self._open[0].wait()
        self.point("complete")
        self._written.append(self._open[0].finish())
        self._open.popleft()

    def __enter__(self) -> FileSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for writer in self._open:
                writer.abandon()


def write_images(
    backend: StorageBackend,
    staging: Staging,
    chunk_size: int,
    executor: Executor,
    timings: Timings,
    point: Callable[[str], None] = lambda name: None,
) -> list[WrittenFile]:
    """Write every image of ``staging`` to a durable file, each piece as soon as it is copied.

    A piece's memory is given back when the piece is written. On an error, incomplete files are removed and no thread
    uses staging memory when the error is raised; removing complete files is up to the caller.
    """
    with FileSequence(backend, chunk_size, executor, timings, lambda name: point(f"write.{name}")) as files:
        try:
            for image in staging.images:
                if not image.key:
                    continue  # fragments, which go to other ranks
                file = files.create(image)
                for piece in staging.pieces_of(image):
                    file.write(piece.start, staging.content(piece), partial(staging.release, piece))
            return files.finish()
        except BaseException as error:
            staging.cancel(error)
            raise


def write_whole(backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings) -> WrittenFile:
    """Write an image that consists of its head only, and make it durable. Removes the file if that fails."""
    with backend.create(image.key, image.size) as writer:
        with timings.measure("write", image.size):
            writer.write(0, image.head)
        with timings.measure("sync"):
            writer.complete()
    return WrittenFile.of(image, chunk_size, empty_checksums())


def check_space(backend: StorageBackend, nbytes: int) -> None:
    """Raise ``StorageFullError``, before anything is copied, if the store reports less free space than ``nbytes``.

    The space of a checkpoint that will be overwritten does not count as free: it stays until the new one is committed.
    """
    free = backend.free_bytes()
    if free is not None and free < nbytes:
        raise StorageFullError(
            f"{backend.url}: this checkpoint needs {nbytes:,} bytes, but only {free:,} are free. Nothing was written; "
            f"free space, keep fewer checkpoints, or save elsewhere"
        )
