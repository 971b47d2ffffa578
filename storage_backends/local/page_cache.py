"""What of a file the page cache has, found out without changing it where the kernel can say so."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from collections.abc import Callable
from random import randrange

import numpy as np

from .posix import libc_function

__all__ = ["REFUSALS", "PageCache"]

# EINVAL is how a file system refuses O_DIRECT, an alignment or a flag; the others come from FUSE and stacked ones.
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})

_CACHESTAT = 451  # the number of the system call, Linux 6.5
_RANGE = "<2Q"  # offset, length
_COUNTS_BYTES = 40  # five 64-bit counts, the first of them the pages that are cached
_SHARE = 7 / 8  # of a range, for it to count as cached: the kernel reads the rest ahead
_Count = Callable[[int, int, int], int | None]

_LOOKS = 2  # both at random: one could meet the page that an earlier look has left


class PageCache:
    """Asks about one open file. Thread-safe. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._count: _Count | None = None
        self._tried = False

    def has(self, offset: int, length: int) -> bool:
        """Whether it seems to have these bytes. True also where the file system cannot tell: going past a cache that
        has them costs more than it would ever gain."""
        if length < 1:
            return True
        if not self._tried:
            self._count, self._tried = self._counting(), True
        if self._count is None:
            return self._look(offset, length)
        first, end = offset // mmap.PAGESIZE, -(-(offset + length) // mmap.PAGESIZE)
        return (self._count(self._fd, offset, length) or 0) >= _SHARE * (end - first)

    def _counting(self) -> _Count | None:
        """How cached pages of this file can be counted; None: they cannot."""
        # A page that was read a moment ago is there, unless this file's pages belong to another one (overlayfs).
        os.preadv(self._fd, [bytearray(1)], 0)
        return next((count for count in (_cached_pages, _mapped_pages) if count(self._fd, 0, 1)), None)

    def _look(self, offset: int, length: int) -> bool:
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        # At single pages, because what is not there the kernel begins to read at once, as much as it was asked for (a
        # device may even be done before the kernel answers). At random, because each look leaves its page behind, and
        # a later look must not take that for the whole.
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


def _mapped_pages(fd: int, offset: int, length: int) -> int | None:
    """The same by mincore(2), which also sees the file below an overlay; None where it does not say, as of files that
    this user may not write: of these it calls every page cached. Of the file's end, pages count that are there."""
    mincore = libc_function("mincore") if sys.platform == "linux" else None
    if mincore is None or not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return None
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = min(offset + length, os.fstat(fd).st_size)
    if end <= begin:
        return 0
    try:
        with mmap.mmap(fd, end - begin, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin) as mapping:
            seen = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            code = mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), ctypes.c_void_p(seen.ctypes.data))
    except (OSError, ValueError):  # not every file system maps files; one may have been cut short meanwhile
        return None
    return None if code else int((seen & 1).sum())
