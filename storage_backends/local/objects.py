"""The reader and the writer of one file of a ``LocalBackend``."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from threading import Lock

from typing_extensions import Buffer

from ...errors import KeyNotFoundError, StorageError, StorageFullError
from ..base import ObjectReader
from ..buffers import byte_view, writable_view
from ..posix import free_bytes, preallocate, read_scattered_at, refresh, write_at
from ..writers import CheckedWriter
from .direct_io import MIN_WRITE, PAGE, DirectFile, write_direct
from .page_cache import PageCache
from .root import LocalRoot

_log = logging.getLogger(__name__)


class LocalWriter(CheckedWriter):
    """Write a file in place. Large parts bypass the page cache if the file system supports it.

    A descriptor is closed only when no thread is inside a write: the kernel reuses its number for the next file that is
    opened, and a late write would end up in that file.
    """

    def __init__(self, root: LocalRoot, action: str, size: int) -> None:
        super().__init__(action, size)
        self._root = root
        self._direct: DirectFile | None = None
        self._writes_in_progress = 0

    def create_file(self, path: str) -> None:
        """Create the file. Raises ``OSError``."""
        # Unlink instead of truncating, so that open readers keep the bytes of the old object.
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._path = path

    def prepare(self, *, reserve: bool) -> None:
        """Choose how to write; ``reserve`` the space, so that a full disk is detected before the first byte is copied.

        A file that may become smaller gets no reservation: it would take from others what it does not need.
        """
        if reserve:
            self._reserve()
        if self._size >= MIN_WRITE:
            self._direct = self._root.open_direct(self._fd, os.O_WRONLY)

    def _reserve(self) -> None:
        with self._translated_errors():
            is_reserved = preallocate(self._fd, self._size)
        if not is_reserved:
            free = free_bytes(self._path)
            if free is not None and free < self._size:
                raise StorageFullError(
                    f"{self._action}: needed: {self._size} bytes, free on this file system: {free} bytes; free space"
                )

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._changed:
            self._admit(offset, len(view))
            self._writes_in_progress += 1
        try:
            with self._translated_errors():
                self._write(view, offset)
        except BaseException as error:
            with self._changed:
                self._state, self._failure = "failed", self._failure or error
            raise
        finally:
            with self._changed:
                self._writes_in_progress -= 1
                self._changed.notify_all()

    def complete(self) -> None:
        with self._changed:
            self._check_open()
            if self._writes_in_progress:
                raise StorageError(f"{self._action}: complete() was called while a thread was writing")
            self._seal()
            fd, self._fd = self._fd, -1
        with self._translated_errors():
            try:
                if os.fstat(fd).st_size > self._size:
                    os.ftruncate(fd, self._size)
                # This covers direct writes too. It is not retried: after a failed fsync the kernel may have dropped
                # the dirty pages, and a second one would succeed without having written them.
                os.fdatasync(fd)
            finally:
                self._close(fd)
        self._root.sync_directories(self._path, self._action)
        with self._changed:
            self._state = "complete"

    def abort(self) -> None:
        with self._changed:
            if not self._withdraw():
                return
            self._changed.wait_for(lambda: not self._writes_in_progress)
            fd, self._fd = self._fd, -1
        try:
            if fd >= 0:
                self._close(fd)
            os.unlink(self._path)
        except OSError as error:
            _log.warning("%s: could not remove the incomplete object: %s", self._action, error)
        self._root.remove_empty_directories(os.path.dirname(self._path))

    def _write(self, data: memoryview, offset: int) -> None:
        if self._direct is None:
            write_at(self._fd, data, offset)
            return
        write_direct(self._direct, self._fd, data, offset)
        if self._direct.refused:
            self._root.disable_direct_io("a write was refused")

    def _close(self, fd: int) -> None:
        try:
            if self._direct is not None:
                self._direct.close()
        finally:
            os.close(fd)

    def _translated_errors(self) -> AbstractContextManager[None]:
        return self._root.translated_errors(self._action, reading=False, needed=self._size)


class LocalReader(ObjectReader):
    """A regular file, opened for reading. It remains the same file if the key is replaced."""

    size: int

    def __init__(self, root: LocalRoot, path: str, action: str) -> None:
        self._root = root
        self._action = action
        self._direct: DirectFile | None = None
        self._direct_tried = False
        self._lock = Lock()
        self.fd = -1
        with self._translated_errors():
            # O_NONBLOCK keeps a FIFO with a hostile name from blocking; it has no effect on regular files.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            refresh(self.fd)
            try:
                self.found = os.fstat(self.fd)
                """What the file system states of the file."""
            except OSError:
                self.close()
                raise
        if not stat.S_ISREG(self.found.st_mode):
            self.close()
            raise KeyNotFoundError(f"{action}: it is not a file")
        self.size = self.found.st_size
        self._cache = PageCache(self.fd)

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        views = [writable_view(self._action, buffer) for buffer in buffers]
        if offset < 0:
            raise StorageError(f"{self._action}: the offset is {offset}")
        end = offset + sum(map(len, views))
        with self._translated_errors():
            done = read_scattered_at(self.fd, views, offset)
        # An empty read beyond the end moves no bytes, but it is out of range.
        if done < end - offset or offset > self.size:
            raise StorageError(
                f"{self._action}: requested bytes [{offset}, {end}), got {done}: the object has only "
                f"{self.size} bytes; it was cut short or replaced"
            )

    def read_all(self, max_size: int | None) -> bytes:
        """Read to the end of the file, whatever size was cached; no more than a byte beyond ``max_size``."""
        content, done = bytearray(self.size + 1), 0
        with self._translated_errors():
            while True:
                with memoryview(content) as view:
                    done += read_scattered_at(self.fd, [view[done:]], done)
                    if done < len(content) or (max_size is not None and done > max_size):
                        return bytes(view[:done])
                content += bytes(len(content))

    def is_cached(self, offset: int, length: int) -> bool:
        with self._translated_errors():
            return self._cache.has(offset, length)

    def direct_alignment(self) -> int:
        return PAGE if self._open_direct() is not None else 0

    def read_direct(self, offset: int, buffer: Buffer) -> int:
        view = byte_view(buffer)
        direct = self._open_direct()
        done = 0
        with self._translated_errors():
            if direct is not None:
                done = direct.read(view, offset)
                if direct.refused:
                    self._root.disable_direct_io("a read was refused")
            if done < len(view) and offset + done < self.size:
                # The direct read was refused or short: a read through the page cache reports the cause.
                done += read_scattered_at(self.fd, [view[done:]], offset + done)
        return done

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        direct, self._direct = self._direct, None
        with suppress(OSError):
            if direct is not None:
                direct.close()
        with suppress(OSError):
            if fd >= 0:
                os.close(fd)

    def _open_direct(self) -> DirectFile | None:
        if not self._root.direct_io:
            return None
        with self._lock:
            if not self._direct_tried:
                self._direct_tried = True
                self._direct = self._root.open_direct(self.fd, os.O_RDONLY)
            return self._direct

    def _translated_errors(self) -> AbstractContextManager[None]:
        return self._root.translated_errors(self._action, reading=True)
