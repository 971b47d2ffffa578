"""Page-aligned memory on huge pages for staging and reading: faulted in once, pinned for devices, and reused.

A fresh buffer copies at a fifth of a warm one's speed, because each page is faulted in on the first access.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process

_log = logging.getLogger(__name__)


class Pinning:
    """The registration of ``memory``, contiguous bytes of the host, with CUDA. Thread-safe.

    The memory stays mapped for as long as it is registered: CUDA would treat what is mapped there next as pinned.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._unpin: Callable[[], object] | None = None
        self._was_tried = False

    def pin(self, device: torch.device) -> int:
        """Register the memory unless it is registered. Returns CUDA's error code, or 0.

        All devices may use it then. ``device`` is one that the process uses already: CUDA makes a context, which takes
        hundreds of MiB, on the calling thread's current device, and that is device 0 on a new thread.
        """
        with self._lock:  # several threads may use the memory, and CUDA refuses to register it twice
            if self._unpin is not None:
                return 0
            with torch.cuda.device(device):
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                address, nbytes = self._memory.data_ptr(), self._memory.nbytes
                failed = int(runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
                if failed:
                    _clear_error()
            if not failed:
                self._unpin = weakref.finalize(self, _unregister, address, device)
            return failed

    def try_pin(self, device: torch.device) -> None:
        """Register the memory where that is possible. Tries only once.

        Copies from and to pageable memory are correct too: CUDA has read or written it before the call returns.
        """
        if self._was_tried:
            return
        self._was_tried = True
        failed = self.pin(device)
        if failed:
            _log.debug("CUDA cannot pin %d bytes (error %d); copies are slower", self._memory.nbytes, failed)

    def unpin(self) -> None:
        """Undo ``pin``, if the memory is pinned."""
        with self._lock:
            if self._unpin is not None:
                self._unpin()
                self._unpin = None


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _clear_error() -> None:
    """Forget this thread's last CUDA error, which torch would raise from its next call, for something else."""
    with suppress(OSError, AttributeError):  # torch has loaded the library, unless it contains it
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()


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
