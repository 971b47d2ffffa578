"""Page-aligned memory on huge pages for staging and reading. It is faulted in once and then reused.

A fresh buffer copies at a fifth of a warm one's speed, because each page is faulted in on the first access.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress

import torch

from .pinning import Pinning

__all__ = ["PAGE", "Block", "page_round"]

PAGE = 4096

_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14: fault in all pages with one call
_WIPE_ON_FORK = 18  # madvise(2), Linux 4.14: a child gets zeros, so the parent never pays for copies of pages

# ``mmap.madvise`` holds the GIL, which would stop the training while pages are faulted in; ctypes releases it.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def page_round(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Block:
    """``nbytes`` (a multiple of ``PAGE``) of anonymous memory. Its initial content is undefined.

    Use ``view`` to write or hash the memory, and ``tensor`` (uint8) or ``address`` to fill it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        huge = nbytes // _HUGE_PAGE * _HUGE_PAGE  # bytes on huge pages; more would exceed ``nbytes`` in memory
        self._memory = mmap.mmap(-1, nbytes + (_HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -mapped.data_ptr() % _HUGE_PAGE if huge else 0
        with suppress(OSError):  # older kernel
            self._memory.madvise(_WIPE_ON_FORK)
        if huge:
            with suppress(OSError):  # a kernel without transparent huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, huge)
        self._warm = 0
        self._lock = threading.Lock()
        self.tensor = mapped[self._start : self._start + nbytes]
        self.view = memoryview(self._memory)[self._start : self._start + nbytes]
        self.address = self.tensor.data_ptr()
        self.pinning = Pinning(self.tensor)

    def fault_in(self, nbytes: int) -> None:
        """Bring the first ``nbytes`` into memory before anything is written there. Thread-safe; free if repeated."""
        with self._lock:
            if nbytes <= self._warm:
                return
            stop = min(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, self.nbytes)
            # One huge page at a time: a call keeps other threads from mapping memory until it returns.
            for start in range(self._warm, stop, _HUGE_PAGE):
                end = min(start + _HUGE_PAGE, stop)
                if _madvise(self.address + start, end - start, _POPULATE_WRITE):  # older kernel
                    self.tensor[start:end].zero_()
            self._warm = stop

    def pin(self, device: torch.device) -> int:
        """Fault in the memory and register it with CUDA, like ``Pinning.pin``."""
        self.fault_in(self.nbytes)
        return self.pinning.pin(device)

    def unpin(self) -> None:
        """Undo ``pin``, if the memory is pinned."""
        self.pinning.unpin()
