"""Directories of a ``LocalBackend``, and how a finished file gets its name in one. Raises ``OSError``."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from .posix import rename_exclusive, sync_directory

__all__ = ["TEMPORARY", "drop_leftovers", "inside", "link_exclusive", "make_directories"]

TEMPORARY = ".bcp-tmp-"
"""What the names of temporary files begin with."""


def inside(path: str, top: str) -> bool:
    """Whether ``path`` is ``top`` or below it; both resolved."""
    return path == top or path.startswith(top.rstrip("/") + "/")


def make_directories(path: str) -> None:
    """Make a directory and what is missing above it, each made durable before anything is put in it."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
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


def drop_leftovers(directory: str) -> bool:
    """Remove the temporary files of killed processes, if there is nothing else. A ``put`` that is writing one of them
    right now finds it gone and starts again."""
    try:
        names = os.listdir(directory)
        if not all(name.startswith(TEMPORARY) for name in names):
            return False
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
    except OSError:
        return False
    return True
