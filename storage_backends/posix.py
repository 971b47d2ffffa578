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

WITHOUT_LINKS = UNSUPPORTED | {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EIO}
"""What a file system answers to a hard link, or an exclusive rename, that it does not support; rclone uses EIO."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})

_AT_FDCWD = -100
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = 0x1000, 0x2000, 0x7FF
_STAT_BYTES = 256  # more than a struct statx, or statfs
_RENAME_NOREPLACE = 1

# Lustre, GPFS and CephFS have locks that keep the caches of all hosts consistent.
_CONSISTENT = {
    "ext4": 0xEF53,
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "tmpfs": 0x01021994,
    "ramfs": 0x858458F6,
    "overlay": 0x794C7630,
    "exfat": 0x2011BAB0,
    "vfat": 0x4D44,
    "ntfs3": 0x7366746E,
    "lustre": 0x0BD00BD0,
    "gpfs": 0x47504653,
    "ceph": 0x00C36400,
}
# The defaults of NFS and SMB; those of FUSE are between 20 s (sshfs), 60 s (gcsfuse) and 5 minutes (rclone).
_NETWORK_STALENESS_S = {0x6969: 60.0, 0xFE534D42: 60.0}
_MOUNT_STALENESS_S = 300.0


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
    if code in WITHOUT_LINKS:
        return False
    raise OSError(code, os.strerror(code), target)


def flush(fd: int) -> None:
    """Let a mount send what was written, which some do when a descriptor is closed. Raises ``OSError``."""
    os.close(os.dup(fd))


def refresh(file: int | str) -> None:
    """Replace the size and the times of a file that a mount may have cached, so that ``stat`` returns those it has now.

    Never raises.
    """
    statx = libc_function("statx")
    if statx is not None:
        folder, path = (file, b"") if isinstance(file, int) else (_AT_FDCWD, os.fsencode(file))
        flags, found = _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, ctypes.create_string_buffer(_STAT_BYTES)
        statx(folder, path, flags, ctypes.c_uint(_STATX_BASIC_STATS), found)


def staleness_s(path: str) -> float:
    """Return for how long listings and attributes on the file system of a path, which need not exist, may be stale."""
    statfs = libc_function("statfs")
    found = ctypes.create_string_buffer(_STAT_BYTES)
    if statfs is None or statfs(os.fsencode(nearest_existing(path)), found) != 0:
        return _MOUNT_STALENESS_S
    kind = ctypes.c_uint32(ctypes.c_long.from_buffer(found).value).value
    return 0.0 if kind in _CONSISTENT.values() else _NETWORK_STALENESS_S.get(kind, _MOUNT_STALENESS_S)


def nearest_existing(path: str) -> str:
    """Return a path, or the nearest folder above it that exists."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


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
    try:
        found = os.statvfs(nearest_existing(path))
    except OSError:
        return None
    # Mounts of object stores report no blocks, -1 or more free ones than there are.
    is_known = found.f_blocks > 0 and 0 <= found.f_bavail <= found.f_blocks
    return found.f_bavail * found.f_frsize if is_known else None


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
    if error.errno == errno.ESPIPE:
        return StorageError(f"{text}; the mount writes files only in order: give it a write cache (--vfs-cache-mode)")
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
