"""Find out which parts of a file are in the page cache, without changing it where the kernel allows that."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable
from functools import cached_property
from random import randrange

import numpy as np

from ..posix import UNSUPPORTED, libc_function

_CACHESTAT = 451  # system call number, Linux 6.5
_RANGE = "<2Q"  # offset, length
_COUNTS_BYTES = 40  # five 64-bit counts; the first is the number of cached pages
# A range counts as cached if this share of it is: the kernel reads the rest ahead.
_CACHED_SHARE = 7 / 8
_Count = Callable[[int, int, int], int | None]

# Random probes per range: a single one could hit the page that an earlier probe has left in the cache.
_PROBES = 2


class PageCache:
    """The page cache of one open file. Thread-safe. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def has(self, offset: int, length: int) -> bool:
        """Whether the cache seems to contain these bytes.

        True as well if it is unknown: bypassing a cache that contains the bytes costs more than it could
        gain.
        """
        if length < 1:
            return True
        if self._count is None:
            return self._probe(offset, length)
        first, end = offset // mmap.PAGESIZE, -(-(offset + length) // mmap.PAGESIZE)
        return (self._count(self._fd, offset, length) or 0) >= _CACHED_SHARE * (end - first)

    @cached_property
    def _count(self) -> _Count | None:
        """The function that can count cached pages of this file, or None."""
        # A page that was just read is cached, unless the pages belong to another file (overlayfs).
        os.preadv(self._fd, [bytearray(1)], 0)
        return next((count for count in (_cached_pages, _mapped_pages) if count(self._fd, 0, 1)), None)

    def _probe(self, offset: int, length: int) -> bool:
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        # Probe single pages, because the kernel begins to read a missing range at once, and a fast device may finish
        # before the call returns. Probe at random, because each probe leaves its page in the cache.
        page = memoryview(bytearray(mmap.PAGESIZE))
        try:
            return all(os.preadv(self._fd, [page], offset + randrange(length), os.RWF_NOWAIT) for _ in range(_PROBES))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return True


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Return how many pages of this range are cached; None if cachestat(2) does not work.

    Unlike a probing read, this leaves no page in the cache. Isolated cached pages would keep the kernel from reading
    their neighbours ahead in large folios, which makes later reads a quarter slower.
    """
    # On other systems the number means another call.
    syscall = libc_function("syscall") if sys.platform == "linux" else None
    if syscall is None:
        return None
    counts = ctypes.create_string_buffer(_COUNTS_BYTES)
    asked = struct.pack(_RANGE, offset, length)
    if syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), asked, counts, ctypes.c_uint(0)) != 0:
        return None
    return int.from_bytes(counts.raw[:8], "little")


def _mapped_pages(fd: int, offset: int, length: int) -> int | None:
    """Like ``_cached_pages``, with mincore(2), which also sees the file below an overlay.

    None for a file that this user cannot write to, because mincore reports every page of it as cached. At the end of
    the file, only existing pages count.
    """
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
    except (OSError, ValueError):  # the file system cannot map files, or the file was truncated
        return None
    return None if code else int((seen & 1).sum())
