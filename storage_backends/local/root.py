"""The root of a ``LocalBackend``: what the backend shares with its readers and writers, and operations on directories.

The functions raise ``OSError``.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ...errors import StorageError, StorageFullError
from ..keys import TEMPORARY_PREFIX
from ..posix import UNSUPPORTED, WITHOUT_LINKS, free_bytes, map_os_error, refresh, rename_exclusive, sync_directory
from .direct_io import DirectFile

_log = logging.getLogger(__name__)


def is_within(path: str, top: str) -> bool:
    """Whether ``path`` is ``top`` or below it. Both are resolved."""
    return path == top or path.startswith(top.rstrip("/") + "/")


def is_readable_below(path: str, top: str) -> bool:
    """Whether ``path`` is below ``top``, or is what a snapshot of the Hugging Face cache links to. Both are resolved.

    In that cache, ``<model>/snapshots/<revision>`` consists of links to files in ``<model>/blobs``.
    """
    model, snapshots, _ = top.rpartition("/snapshots/")
    return is_within(path, top) or (bool(snapshots) and is_within(path, f"{model}/blobs"))


def make_directories(path: str) -> None:
    """Create a directory and its missing parents, and make each one durable before anything is put in it."""
    try:
        os.mkdir(path)
    except FileExistsError:
        # stat raises if another process has removed the directory since; the caller then starts again.
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        return
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path:
            raise
        make_directories(parent)
        with suppress(FileExistsError):
            os.mkdir(path)
    sync_directory(os.path.dirname(path))


def renew_directories(path: str) -> None:
    """Create a directory that does not exist, although this host has cached that it does: another one has removed it.

    A new directory is renamed to it, which every mount passes on.
    """
    temporary = os.path.join(os.path.dirname(path), TEMPORARY_PREFIX + secrets.token_hex(8))
    try:
        os.mkdir(temporary)
    except FileNotFoundError:
        renew_directories(os.path.dirname(path))
        os.mkdir(temporary)
    try:
        os.rename(temporary, path)
    except OSError:  # it exists, and is not empty
        with suppress(OSError):
            os.rmdir(temporary)


def replace_exclusive(source: str, target: str, is_expected: Callable[[os.stat_result], bool]) -> bool:
    """Give the finished file ``source`` the name ``target`` in one step, if that is the expected file.

    Writers that use this function exclude each other by a lock on the file that they replace, which ends with their
    process. Returns false if ``target`` is another file or none, or if another writer is replacing it. A file system
    without locks cannot exclude two writers that look at the same moment.
    """
    try:
        fd = _open_to_lock(target)
    except FileNotFoundError:
        return False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, *UNSUPPORTED):
                raise
            _log.info("%s: this file system has no locks (%s)", target, error)
        refresh(fd)
        try:
            found = os.stat(target)
        except FileNotFoundError:
            return False
        if not os.path.samestat(found, os.fstat(fd)) or not is_expected(found):
            return False
        os.replace(source, target)
        return True
    finally:
        # A forked child may have a copy of the descriptor, which would keep the lock.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(fd)


def _open_to_lock(path: str) -> int:
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)  # NFS locks only files that are open for writing
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, *UNSUPPORTED):
            raise
        return os.open(path, os.O_RDONLY | flags)


def link_exclusive(source: str, target: str) -> None:
    """Give the finished file ``source`` the name ``target`` in one step, or raise ``FileExistsError`` if it exists.

    A hard link does this on every POSIX file system that has them, ``renameat2`` on most others. If there is neither,
    this raises: creating ``target`` empty with ``O_EXCL`` and renaming over it would be exclusive, but readers could
    see an empty object, and a crash would leave one.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        # NFS may have created the link and lost the reply; the retransmission then finds the link.
        if os.stat(source).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        if rename_exclusive(source, target):
            return
        if error.errno == errno.EIO:
            raise
        raise OSError(errno.EOPNOTSUPP, "this file system has neither hard links nor renameat2", target) from error
    with suppress(OSError):  # where nothing can be removed, both names stay
        os.unlink(source)


def supports_exclusive_names(directory: str) -> bool:
    """Whether ``link_exclusive`` works on the file system of a directory, which may not exist yet.

    Many FUSE mounts of object stores have neither hard links nor flags of ``renameat2``. Returns true if it cannot be
    found out; ``link_exclusive`` then raises what is wrong.
    """
    while not os.path.isdir(directory) and os.path.dirname(directory) != directory:
        directory = os.path.dirname(directory)
    names = [os.path.join(directory, TEMPORARY_PREFIX + secrets.token_hex(8)) for _ in range(2)]
    try:
        os.close(os.open(names[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        link_exclusive(*names)
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.EIO)
    else:
        return True
    finally:
        for name in names:
            with suppress(OSError):
                os.unlink(name)


def lock_temporary(fd: int) -> None:
    """Lock a temporary file while it is open, so that ``remove_abandoned_files`` does not remove it."""
    # On a file system without locks, remove_abandoned_files cannot lock the file either and leaves it.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned_files(directory: str) -> bool:
    """Remove the temporary files of killed processes if the directory contains nothing else.

    Returns false if something remains.
    """
    try:
        names = os.listdir(directory)
        return all(name.startswith(TEMPORARY_PREFIX) for name in names) and all(
            _remove_if_abandoned(os.path.join(directory, name)) for name in names
        )
    except OSError:
        return False


def _remove_if_abandoned(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    try:
        # The kernel releases the lock of a killed process. A put that has opened its file but not locked it yet finds
        # that the file is gone, and starts again.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        return True
    finally:
        os.close(fd)
    return True


# Other processes may add files to a directory that is about to be removed, repeatedly. A file system may also hide what
# it has left in a directory (overlayfs), so that the directory seems empty and still cannot be removed.
_MAX_TRIES = 16


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
