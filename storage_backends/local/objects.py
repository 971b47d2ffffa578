"""One file of a ``LocalBackend``, being written or being read."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from threading import Condition, Lock
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Buffer

from ..errors import KeyNotFoundError, StorageError, StorageFullError
from .base import ObjectReader, ObjectWriter
from .direct_io import MIN_READ, MIN_WRITE, PAGE, DirectFile, read_direct, write_direct
from .page_cache import PageCache
from .pieces import PieceMap, byte_view
from .posix import free_bytes, preallocate, read_scattered_at, write_at

if TYPE_CHECKING:
    from .local import LocalBackend

__all__ = ["LocalReader", "LocalWriter"]

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
        self._failure: BaseException | None = None
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
            self._raise_failure()
            self._check_open()
            self._pieces.add(offset, len(view))
            self._writing += 1
        try:
            self._call(lambda: self._write(view, offset))
        except BaseException as error:
            with self._idle:
                self._state, self._failure = "failed", self._failure or error
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
            self._state, self._failure = "aborted", None
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

    def _raise_failure(self) -> None:
        """Of several threads that write, whichever is heard first tells the cause."""
        if isinstance(self._failure, StorageError):
            raise type(self._failure)(*self._failure.args) from self._failure

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")

    def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return function()
        except OSError as error:
            raise self._backend.map_error(error, self._action, reading=False, needed=self._size) from error


class LocalReader(ObjectReader):
    """A regular file opened for reading; it stays the file that it was, also when the key means another by now.

    Much that the page cache does not have comes straight from the device.
    """

    def __init__(self, backend: LocalBackend, path: str, action: str) -> None:
        self._backend = backend
        self._action = action
        self._direct: DirectFile | None = None
        self._direct_tried = False
        self._lock = Lock()
        try:
            # O_NONBLOCK: a FIFO under a hostile name must not hang the open. It means nothing for regular files.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            found = os.fstat(self.fd)
        except OSError as error:
            raise backend.map_error(error, action, reading=True) from error
        if not stat.S_ISREG(found.st_mode):
            os.close(self.fd)
            raise KeyNotFoundError(f"{action}: it is not a file")
        self.size = found.st_size
        self._cache = PageCache(self.fd)

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._read(offset, [byte_view(buffer) for buffer in buffers], None)

    def read_once(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """``read``, past the page cache where that is better."""
        views = [byte_view(buffer) for buffer in buffers]
        length = sum(map(len, views))
        cached = length < MIN_READ or offset < 0 or self.is_at_hand(offset, length)
        self._read(offset, views, None if cached else self._open_direct())

    def is_at_hand(self, offset: int, length: int) -> bool:
        return self._call(lambda: self._cache.has(offset, length))

    def direct_pages(self) -> int:
        return PAGE if self._open_direct() is not None else 0

    def read_direct(self, offset: int, buffer: Buffer) -> int:
        view = byte_view(buffer)
        direct = self._open_direct()
        done = 0
        if direct is not None:
            done = self._call(lambda: direct.read(view, offset))
            self._note_refusal(direct)
        if done < len(view) and offset + done < self.size:
            # Refused, or stopped short: the page cache can tell why.
            done += self._call(lambda: read_scattered_at(self.fd, [view[done:]], offset + done))
        return done

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        if fd >= 0:
            os.close(fd)

    def _open_direct(self) -> DirectFile | None:
        if not self._backend.direct_io:
            return None
        with self._lock:
            if not self._direct_tried:
                self._direct_tried = True
                self._direct = self._backend.open_direct(self.fd, os.O_RDONLY)
            return self._direct

    def _read(self, offset: int, views: Sequence[memoryview], direct: DirectFile | None) -> None:
        if any(view.readonly for view in views):
            raise StorageError(f"{self._action}: the buffer to read into is read-only")
        if offset < 0:
            raise StorageError(f"{self._action}: the offset is {offset}")
        end = offset + sum(map(len, views))
        if direct is None:
            done = self._call(lambda: read_scattered_at(self.fd, views, offset))
        else:
            done = self._call(lambda: read_direct(direct, self.fd, views, offset))
            self._note_refusal(direct)
        # An empty read beyond the end moves no bytes, but the bytes it asks for are not there either.
        if done < end - offset or offset > self.size:
            raise StorageError(
                f"{self._action}: wanted bytes [{offset}, {end}), got {done}: the object has only "
                f"{self.size} bytes; it was cut short or replaced"
            )

    def _note_refusal(self, direct: DirectFile) -> None:
        if direct.refused:
            self._backend.give_up_direct("a read was refused")

    def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return function()
        except OSError as error:
            raise self._backend.map_error(error, self._action, reading=True) from error
