"""What of a file the page cache has, found out without changing it where the kernel can say so."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from random import randrange

from .posix import libc_function

__all__ = ["REFUSALS", "PageCache"]

# EINVAL is how a file system refuses O_DIRECT, an alignment or a flag; the others come from FUSE and stacked ones.
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})

_CACHESTAT = 451  # the number of the system call, Linux 6.5
_RANGE = "<2Q"  # offset, length
_COUNTS_BYTES = 40  # five 64-bit counts, the first of them the pages that are cached
_SHARE = 7 / 8  # of a range, for it to count as cached: the kernel reads the rest ahead
_LOOKS = 2  # both at random: one could meet the page that an earlier look has left


class PageCache:
    """Asks about one open file. Thread-safe. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._counts: bool | None = None  # whether the kernel counts cached pages of this file; None: not tried

    def has(self, offset: int, length: int) -> bool:
        """Whether it seems to have these bytes. True also where the file system cannot tell: going past a cache that
        has them costs more than it would ever gain."""
        if length < 1:
            return True
        if self._counts is None:
            self._counts = self._can_count()
        if not self._counts:
            return self._look(offset, length)
        first, end = offset // mmap.PAGESIZE, -(-(offset + length) // mmap.PAGESIZE)
        return (_cached_pages(self._fd, offset, length) or 0) >= _SHARE * (end - first)

    def _can_count(self) -> bool:
        # A page that was read a moment ago is there, unless this file's pages belong to another one (overlayfs).
        os.preadv(self._fd, [bytearray(1)], 0)
        return bool(_cached_pages(self._fd, 0, 1))

    def _look(self, offset: int, length: int) -> bool:
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        # At single pages, because what is not there the kernel begins to read at once, as much as it was asked for. At
        # random, because each look leaves its page behind, and a later look must not take that for the whole.
        page = memoryview(bytearray(mmap.PAGESIZE))
        try:
            return all(os.preadv(self._fd, [page], offset + randrange(length), os.RWF_NOWAIT) for _ in range(_LOOKS))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return True


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """How many pages of this range are cached; None where cachestat(2) does not say. Pages that lie alone among those
    that are not cached would keep the kernel from reading them ahead in large folios later, which makes every read
    of them a quarter slower: hence a call that leaves none behind."""
    # Elsewhere the number means another call.
    syscall = libc_function("syscall") if sys.platform == "linux" else None
    if syscall is None:
        return None
    counts = ctypes.create_string_buffer(_COUNTS_BYTES)
    asked = struct.pack(_RANGE, offset, length)
    if syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), asked, counts, ctypes.c_uint(0)) != 0:
        return None
    return int.from_bytes(counts.raw[:8], "little")
