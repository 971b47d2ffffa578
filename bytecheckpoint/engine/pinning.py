"""Registers host memory with CUDA: a device then copies to and from it directly, and faster than through CUDA's own
buffers."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["Pinning"]

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
