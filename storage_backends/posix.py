"""System calls on files, with the loops that they need and the errors that they mean.

Python retries calls that a signal interrupts (PEP 475), but the caller must continue short reads and writes. Linux
moves at most 0x7ffff000 bytes per call, so they occur in every large transfer.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import cache

from ..errors import AccessDeniedError, KeyNotFoundError, StorageError, StorageFullError
from .buffers import skip_bytes

# The largest number of buffers of one preadv.
_IOV_MAX = 1024

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""What a file system answers that does not support a call, a flag or an alignment; most use EINVAL."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` (bytes) at ``offset``. Raises ``OSError``."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def read_scattered_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers``, one after the other, from ``offset``.

    Returns the number of bytes read, which is less than the sum of the lengths only at the end of the file.
    """
    done = 0
    left = [*buffers]
    while left:
        count = os.preadv(fd, left[:_IOV_MAX], offset + done)
        if count == 0 and any(map(len, left[:_IOV_MAX])):
            break
        done += count
        left = skip_bytes(left, count)
    return done


def preallocate(fd: int, size: int) -> bool:
    """Reserve ``size`` bytes of blocks and set the file's length.

    Returns false if the file system does not support it. Raises ``OSError`` (``ENOSPC``, ``EDQUOT``, ``EFBIG``) if
    there is no room.

    ``os.posix_fallocate`` is not used: if the file system does not support it (NFS before 4.2), the C library emulates
    it by writing to every block, so that all data would be written twice.
    """
    fallocate = libc_function("fallocate64") or libc_function("fallocate")
    if fallocate is None or size == 0:
        return False
    while fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code))
    return True


def rename_exclusive(source: str, target: str) -> bool:
    """Rename in one step unless ``target`` exists, in which case ``FileExistsError`` is raised.

    Returns false if the kernel or the file system does not support it.
    """
    renameat2 = libc_function("renameat2")
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE))
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), target)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable. A file system that does not support it is not an error."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def free_bytes(path: str) -> int | None:
    """Return how many bytes this user can write at ``path``, which need not exist; None if it is unknown."""
    while True:
        try:
            found = os.statvfs(path)
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent == path:
                return None
            path = parent
        except OSError:
            return None
        else:
            return found.f_bavail * found.f_frsize if found.f_blocks else None


def map_os_error(error: OSError, action: str, *, absent_is_missing_key: bool) -> StorageError:
    """Return the ``StorageError`` that ``error`` means. ``action`` names the operation, the key and the place.

    ``absent_is_missing_key`` is true for reads, where ENOENT and ENOTDIR mean that the key does not exist. For a write
    they mean that a component of the key is itself an object, or that a directory was removed in the meantime.
    """
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    text = f"{action}: {error.strerror or error} ({name})"
    if error.errno in _FULL:
        return StorageFullError(f"{text}; free space or quota, or raise the file size limit (ulimit -f)")
    if error.errno in _DENIED:
        return AccessDeniedError(f"{text}; check the owner, the mode and whether the mount is read-only")
    if error.errno in _ABSENT and absent_is_missing_key:
        return KeyNotFoundError(f"{action}: no such object")
    if error.errno == errno.ENOTDIR:
        return StorageError(f"{text}; a component of the key is itself an object")
    if error.errno == errno.EIO:
        return StorageError(f"{text}; the device or the mount has failed; check the system's log and use another path")
    return StorageError(text)


@cache
def libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library that returns an int and sets errno; None if the library does not have it."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
