"""System calls on files, each with the loop it needs and the error it means.

Python retries calls that a signal interrupts (PEP 475); short reads and writes are ours to continue. Linux moves at
most 0x7ffff000 bytes a call, so they happen on every large piece.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import cache

from ..errors import AccessDeniedError, KeyNotFoundError, StorageError, StorageFullError
from .pieces import behind

__all__ = [
    "free_bytes",
    "libc_function",
    "map_os_error",
    "preallocate",
    "read_scattered_at",
    "rename_exclusive",
    "sync_directory",
    "write_at",
]

_IOV_MAX = 1024  # buffers that one call fills, at most

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` (bytes) at ``offset``. Raises ``OSError``."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def read_scattered_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers``, one after the other, from ``offset``; the number of bytes read, less than their lengths only at
    the end of the file."""
    done = 0
    left = [*buffers]
    while left:
        count = os.preadv(fd, left[:_IOV_MAX], offset + done)
        if count == 0 and any(map(len, left[:_IOV_MAX])):
            break
        done += count
        left = behind(left, count)
    return done


def preallocate(fd: int, size: int) -> bool:
    """Reserve ``size`` bytes of blocks and set the file's length. False where the file system cannot; ``OSError``
    (``ENOSPC``, ``EDQUOT``, ``EFBIG``) where it could but has no room.

    ``os.posix_fallocate`` is not used: where the file system cannot (NFS before 4.2), the C library emulates it by
    writing into every block, so that everything would be written twice.
    """
    fallocate = libc_function("fallocate64") or libc_function("fallocate")
    if fallocate is None or size == 0:
        return False
    while fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code))
    return True


def rename_exclusive(source: str, target: str) -> bool:
    """Rename unless ``target`` exists (then ``FileExistsError``), in one step. False where the kernel or the file
    system has no such call."""
    renameat2 = libc_function("renameat2")
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE))
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), target)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable. A file system that has nothing of the kind is no error."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def free_bytes(path: str) -> int | None:
    """Bytes that this user may still write where ``path`` is (or would be); None where the file system won't say."""
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
    """The member of the errors tree that ``error`` means. ``action`` says what was being done, to which key, where.

    ``absent_is_missing_key`` is true for reads, where ENOENT and ENOTDIR say that the key does not exist; for a write
    they say that a component of the key is an object itself, or that a directory was removed meanwhile.
    """
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    said = f"{action}: {error.strerror or error} ({name})"
    if error.errno in _FULL:
        return StorageFullError(f"{said}; free space or quota, or raise the file size limit (ulimit -f)")
    if error.errno in _DENIED:
        return AccessDeniedError(f"{said}; check the owner, the mode and whether the mount is read-only")
    if error.errno in _ABSENT and absent_is_missing_key:
        return KeyNotFoundError(f"{action}: no such object")
    if error.errno == errno.ENOTDIR:
        return StorageError(f"{said}; a component of the key is itself an object")
    if error.errno == errno.EIO:
        return StorageError(f"{said}; the device or the mount has failed: see the system's log, and use another")
    return StorageError(said)


@cache
def libc_function(name: str) -> Callable[..., int] | None:
    """A function of the C library that returns an int and sets errno; None where it has no such function."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
