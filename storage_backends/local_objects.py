"""One file of a ``LocalBackend``, being written or being read."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Buffer

from ..errors import KeyNotFoundError, StorageError, StorageFullError
from .base import ObjectWriter
from .direct_io import MIN_READ, MIN_WRITE, DirectFile, is_cached, read_direct, write_direct
from .pieces import PieceMap, byte_view
from .posix import free_bytes, preallocate, read_scattered_at, write_at

if TYPE_CHECKING:
    from .local import LocalBackend

__all__ = ["LocalWriter", "OpenedObject"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LocalWriter(ObjectWriter):
    """Writes in place; large pieces past the page cache, where the file system takes them so.

    A descriptor is closed only when no thread is inside a write: the kernel hands its number to the next file that
    anybody opens, and a late write would land there.
    """

    def __init__(self, backend: LocalBackend, path: str, action: str, fd: int, size: int, pieces: PieceMap) -> None:
        self._backend = backend
        self._path = path
        self._action = action
        self._size = size
        self._pieces = pieces
        self._fd = fd
        self._direct: DirectFile | None = None
        self._state = "open"
        self._writing = 0
        self._idle = Condition()

    def reserve(self) -> None:
        """Take the space now, so that a full disk is known before the first byte is copied."""
        if not self._call(lambda: preallocate(self._fd, self._size)):
            free = free_bytes(self._path)
            if free is not None and free < self._size:
                raise StorageFullError(
                    f"{self._action}: needed: {self._size} bytes, free on this file system: {free} bytes; free space"
                )
        if self._size >= MIN_WRITE:
            self._direct = self._backend.open_direct(self._fd, os.O_WRONLY)

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._idle:
            self._check_open()
            self._pieces.add(offset, len(view))
            self._writing += 1
        try:
            self._call(lambda: self._write(view, offset))
        except BaseException:
            with self._idle:
                self._state = "failed"
            raise
        finally:
            with self._idle:
                self._writing -= 1
                self._idle.notify_all()

    def complete(self) -> None:
        with self._idle:
            self._check_open()
            if self._writing:
                raise StorageError(f"{self._action}: complete() was called while a write was going on")
            self._pieces.check_whole()
            self._state = "failed"
            fd, self._fd = self._fd, -1
        try:
            # Covers what was written directly too. After a failed fsync the kernel may have dropped the dirty pages:
            # trying it again could lie.
            self._call(lambda: os.fdatasync(fd))
        finally:
            self._call(lambda: self._close(fd))
        self._backend.sync_directories(self._path, self._action)
        with self._idle:
            self._state = "complete"

    def abort(self) -> None:
        with self._idle:
            if self._state in ("complete", "aborted"):
                return
            self._state = "aborted"
            self._idle.wait_for(lambda: not self._writing)
            fd, self._fd = self._fd, -1
        try:
            if fd >= 0:
                self._close(fd)
            os.unlink(self._path)
        except OSError as error:
            _log.warning("%s: could not remove what was written: %s", self._action, error)
        self._backend.prune(os.path.dirname(self._path))

    def _write(self, data: memoryview, offset: int) -> None:
        if self._direct is None:
            write_at(self._fd, data, offset)
            return
        write_direct(self._direct, self._fd, data, offset)
        if self._direct.refused:
            self._backend.give_up_direct("a write was refused")

    def _close(self, fd: int) -> None:
        if self._direct is not None:
            self._direct.close()
        os.close(fd)

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")

    def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return function()
        except OSError as error:
            raise self._backend.map_error(error, self._action, reading=False, needed=self._size) from error


class OpenedObject:
    """A regular file opened for reading, one descriptor for one call. No cache: a descriptor that outlives the call
    would go on reading an object that was replaced, and opening costs little beside the piece that is read."""

    def __init__(self, path: str, backend: LocalBackend, action: str) -> None:
        self._path = path
        self._backend = backend
        self._action = action
        self.fd = -1
        self.size = 0

    def __enter__(self) -> OpenedObject:
        try:
            # O_NONBLOCK: a FIFO under a hostile name must not hang the open. It means nothing for regular files.
            self.fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            found = os.fstat(self.fd)
        except OSError as error:
            raise self._backend.map_error(error, self._action, reading=True) from error
        if not stat.S_ISREG(found.st_mode):
            os.close(self.fd)
            raise KeyNotFoundError(f"{self._action}: it is not a file")
        self.size = found.st_size
        return self

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers``, one after the other, from ``offset``; the number of bytes read, less than their lengths
        only at the end of the object. Much that the page cache does not have comes straight from the device."""
        length = sum(map(len, buffers))
        if length < MIN_READ or not self._backend.direct_io or is_cached(self.fd, offset, length):
            return read_scattered_at(self.fd, buffers, offset)
        direct = self._backend.open_direct(self.fd, os.O_RDONLY)
        if direct is None:
            return read_scattered_at(self.fd, buffers, offset)
        try:
            return read_direct(direct, self.fd, buffers, offset)
        finally:
            direct.close()
            if direct.refused:
                self._backend.give_up_direct("a read was refused")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        os.close(self.fd)
        if isinstance(error, OSError):
            raise self._backend.map_error(error, self._action, reading=True) from error
