"""The root directory of a ``LocalBackend``: what the backend shares with its readers and writers."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import StorageError, StorageFullError
from ..posix import free_bytes, map_os_error, sync_directory
from .direct_io import DirectFile
from .directories import is_within, remove_abandoned_files

# Other processes may add files to a directory that is about to be removed, repeatedly. A file system may also hide what
# it has left in a directory (overlayfs), so that the directory seems empty and still cannot be removed.
_MAX_TRIES = 16

_log = logging.getLogger(__name__)


class LocalRoot:
    """The directory ``path`` (absolute) and whether files below it are transferred with ``O_DIRECT``. Thread-safe.

    ``direct_io`` becomes false when the file system refuses a direct transfer.
    """

    def __init__(self, path: str, *, direct_io: bool) -> None:
        self.path = path
        self.direct_io = direct_io

    def resolved(self) -> str:
        """The path with all symbolic links resolved."""
        return os.path.realpath(self.path)

    def open_direct(self, fd: int, flags: int) -> DirectFile | None:
        """Open the file of ``fd`` for direct transfers; None if direct I/O is off or not supported."""
        if not self.direct_io:
            return None
        try:
            return DirectFile(fd, flags)
        except OSError as error:
            self.disable_direct_io(f"opening a file with O_DIRECT: {error.strerror}")
            return None

    def disable_direct_io(self, reason: str) -> None:
        """Use the page cache for all further transfers."""
        if self.direct_io:
            self.direct_io = False
            _log.debug("%s: direct I/O is disabled, transfers use the page cache (%s)", self.path, reason)

    @contextmanager
    def translated_errors(self, action: str, *, reading: bool, needed: int | None = None) -> Iterator[None]:
        """Translate an ``OSError`` that the block raises (see ``map_error``)."""
        try:
            yield
        except StorageError:  # also an OSError
            raise
        except OSError as error:
            raise self.map_error(error, action, reading=reading, needed=needed) from error

    def map_error(self, error: OSError, action: str, *, reading: bool, needed: int | None = None) -> StorageError:
        """Return the ``StorageError`` that ``error`` means.

        ``action`` names the operation and the key; ``needed`` is the size in bytes that did not fit on a full disk.
        """
        self.check_is_directory(action)
        mapped = map_os_error(error, action, absent_is_missing_key=reading)
        if isinstance(mapped, StorageFullError) and needed is not None:
            free = free_bytes(self.path)
            detail = "unknown" if free is None else f"{free} bytes"
            return StorageFullError(f"{mapped} (needed: {needed} bytes, free on this file system: {detail})")
        return mapped

    def check_is_directory(self, action: str) -> None:
        """Raise ``StorageError`` if the root exists and is not a directory."""
        try:
            mode = os.stat(self.path).st_mode
        except OSError:
            return
        if not stat.S_ISDIR(mode):
            raise StorageError(f"{action}: the root {self.path} is a file, not a directory; pass another path")

    def remove_empty_directories(self, directory: str) -> None:
        """Remove ``directory`` and its parents below the root while they contain no object."""
        top = self.resolved()
        tries_left = _MAX_TRIES
        while directory != top and is_within(directory, top):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                tries_left -= 1
                is_full = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not is_full or not tries_left or not remove_abandoned_files(directory):
                    return
                continue
            directory = os.path.dirname(directory)

    def sync_directories(self, path: str, action: str) -> None:
        """Make every name on the way from the root down to the file ``path`` durable."""
        top = self.resolved()
        directory = os.path.dirname(path)
        with self.translated_errors(action, reading=False):
            # Sync all of them: another rank may have created one and not synced it yet.
            while is_within(directory, top):
                sync_directory(directory)
                if directory == top:
                    return
                directory = os.path.dirname(directory)
