"""From staged pieces to durable files: several threads write, this one hashes; one file after the other is completed.

A thread that only writes is asleep while the device works, so that many cost no processor time that training could
have. What is left to do for every byte, to hash it and in a synchronous save to copy it, is done by the one thread that
hands the pieces out: much faster than storage is, and with nobody to fight for the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from functools import partial

from ...storage_backends.base import StorageBackend
from ...trace import Timings
from ..files import FileImage
from ..staging.pieces import Piece
from ..staging.staging import Staging
from .image_write import ImageWrite, WrittenFile

__all__ = ["write_images"]

_FILES_AT_ONCE = 2  # while one is made durable, the next one keeps the device busy


def write_images(
    backend: StorageBackend,
    staging: Staging,
    chunk_size: int,
    executor: Executor,
    timings: Timings,
    point: Callable[[str], None] = lambda name: None,
) -> list[WrittenFile]:
    """Write every image of ``staging``, each piece as soon as it is there, and make it durable; one file is completed
    while the next is written. Every piece's memory is given back when it is written and hashed.

    On any error nothing of the files that were not complete remains and the error is raised, once no thread uses the
    staging memory any more; files completed before are the caller's to remove.
    """
    written = []
    under_way: deque[_FileWrite] = deque()
    try:
        for image in staging.images:
            if not image.key:
                continue  # on its way to other ranks
            point("write.file")
            under_way.append(_FileWrite(backend, image, staging, chunk_size, timings))
            under_way[-1].write(executor)
            if len(under_way) > _FILES_AT_ONCE - 1:
                written.append(under_way[0].finish(point))
                under_way.popleft()
        while under_way:
            written.append(under_way[0].finish(point))
            under_way.popleft()
    except BaseException as error:
        staging.give_up(error)
        for write in under_way:
            write.abandon()
        raise
    return written


class _FileWrite:
    """One file on its way, and the tasks that write its pieces."""

    def __init__(
        self, backend: StorageBackend, image: FileImage, staging: Staging, chunk_size: int, timings: Timings
    ) -> None:
        self._image, self._staging = image, staging
        self._write = ImageWrite(backend, image, chunk_size, timings)
        self._tasks: list[Future[None]] = []

    def write(self, executor: Executor) -> None:
        """Queue every piece, as it gets ready, and hash it."""
        for piece in self._staging.of(self._image):
            data = self._staging.content(piece)
            task = executor.submit(self._write_piece, piece, data)
            self._tasks.append(task)
            self._write.hash_piece(piece.start, data)
            # Now, or as soon as it is written.
            task.add_done_callback(partial(self._give_back, piece))
            if task.done():
                task.result()

    def finish(self, point: Callable[[str], None]) -> WrittenFile:
        """Wait until all is written, and make it durable."""
        for task in wait(self._tasks, return_when=FIRST_EXCEPTION).done:
            task.result()
        point("write.complete")
        return self._write.finish()

    def abandon(self) -> None:
        """Leave nothing behind. Returns when no thread uses the staging memory any more."""
        wait([task for task in self._tasks if not task.cancel()])
        self._write.abandon()

    def _give_back(self, piece: Piece, task: Future[None]) -> None:
        self._staging.give_back(piece)

    def _write_piece(self, piece: Piece, data: memoryview) -> None:
        try:
            self._write.write_piece(piece.start, data)
        except BaseException as error:
            self._staging.give_up(error)
            raise
