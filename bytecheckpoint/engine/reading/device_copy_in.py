"""From bounce buffers to CUDA devices: on streams of their own, with events, so that no thread waits for a copy before
it has something else to put into the same buffer.

A device never copies from a file's pages, only from bounce buffers, which are registered with CUDA once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..tensor_bytes import copy_elements
from .bounce import Bounce

__all__ = ["DeviceCopyIn"]

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class DeviceCopyIn:
    """The device copies of one read. Made on the caller's thread, whose kernels may still be using what is to be
    overwritten: the copies come after them. ``copy`` may then run on any thread."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def takes(self, out: torch.Tensor) -> bool:
        """Whether ``out`` is on one of its devices."""
        return out.device in self._streams

    def copy(self, out: torch.Tensor, source: torch.Tensor, bounce: Bounce) -> None:
        """``out[...] = source``, elements in ``bounce``, which is busy until the copy is done."""
        _pin(bounce)
        stream = self._streams[out.device]
        with torch.cuda.stream(stream):
            if source.is_contiguous() and not (out.is_contiguous() and out.dtype == source.dtype):
                # As it is to the device first, which casts and spreads it faster than the host.
                landed = torch.empty(source.shape, dtype=source.dtype, device=out.device)
                copy_elements(landed, source, non_blocking=True)
                source = landed
            copy_elements(out, source, non_blocking=True)
        event: Any = stream.record_event()
        bounce.busy.append(event.synchronize)


def _pin(bounce: Bounce) -> None:
    if bounce.pin_tried:
        return
    bounce.pin_tried = True
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(bounce.address, bounce.nbytes, _REGISTER_PORTABLE))
    if failed:
        # Copies from ordinary memory are right too: CUDA takes the bytes before the call returns.
        _log.debug("CUDA cannot pin a bounce buffer of %d bytes (error %d)", bounce.nbytes, failed)
        return
    # The arguments keep the memory until it is CUDA's no more.
    weakref.finalize(bounce, _unpin, bounce.tensor, bounce.address)


def _unpin(memory: torch.Tensor, address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
