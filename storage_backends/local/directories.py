"""Directories of a ``LocalBackend``, and how a finished file gets its name. All functions raise ``OSError``."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

from ..keys import TEMPORARY_PREFIX
from ..posix import UNSUPPORTED, WITHOUT_LINKS, refresh, rename_exclusive, sync_directory

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
