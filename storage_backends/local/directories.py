"""Directories of a ``LocalBackend``, and how a finished file gets its name in one. Raises ``OSError``."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress

from .keys import TEMPORARY
from .posix import rename_exclusive, sync_directory

__all__ = ["drop_leftovers", "inside", "link_exclusive", "make_directories", "mark_in_use"]


def inside(path: str, top: str) -> bool:
    """Whether ``path`` is ``top`` or below it; both resolved."""
    return path == top or path.startswith(top.rstrip("/") + "/")


def make_directories(path: str) -> None:
    """Make a directory and what is missing above it, each made durable before anything is put in it."""
    try:
        os.mkdir(path)
    except FileExistsError:
        # stat raises where somebody removed the directory since: the caller starts again then.
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


def link_exclusive(source: str, target: str) -> None:
    """Give the finished file ``source`` the name ``target`` unless that is taken (``FileExistsError``), in one step.

    A hard link does it on every POSIX file system that has them; ``renameat2`` on most others. Where there is
    neither, this refuses: creating ``target`` empty with ``O_EXCL`` and renaming over it would be exclusive, but a
    crash between the two would leave an empty object, and readers could see it even without a crash.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        # NFS may have made the link and lost the reply; the retransmission then finds it made.
        if os.stat(source).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if rename_exclusive(source, target):
            return
        raise OSError(errno.EOPNOTSUPP, "this file system has neither hard links nor renameat2", target) from error
    with suppress(FileNotFoundError):
        os.unlink(source)


def mark_in_use(fd: int) -> None:
    """Lock a temporary file for as long as it is open, so that ``drop_leftovers`` knows that its writer lives."""
    # Where the file system has no locks, drop_leftovers cannot tell either, and lets the file be.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def drop_leftovers(directory: str) -> bool:
    """Remove the temporary files of killed processes, if there is nothing else. False where something remains."""
    try:
        names = os.listdir(directory)
        return all(name.startswith(TEMPORARY) for name in names) and all(
            _drop_if_abandoned(os.path.join(directory, name)) for name in names
        )
    except OSError:
        return False


def _drop_if_abandoned(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    try:
        # The kernel drops the lock of a process that is killed. A put that has opened its file and not locked it yet
        # finds the file gone, and starts again.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        return True
    finally:
        os.close(fd)
    return True
