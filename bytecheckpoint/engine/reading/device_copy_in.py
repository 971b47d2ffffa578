"""Copy from bounce buffers to CUDA devices asynchronously, on internal streams.

No thread waits for a copy until it reuses the bounce buffer. A device copies only from bounce buffers, which are
registered with CUDA once, and never from the pages of a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..tensor_bytes import copy_elements
from .bounce import BounceBuffer

__all__ = ["DeviceCopyIn"]


class DeviceCopyIn:
    """The device copies of one read.

    Create it on the caller's thread: the copies wait for the kernels that this thread has already queued, which may
    still use the tensors. ``copy`` may then run on any thread.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def covers(self, out: torch.Tensor) -> bool:
        """Return whether ``out`` is on one of its devices."""
        return out.device in self._streams

    def copy(self, out: torch.Tensor, source: torch.Tensor, buffer: BounceBuffer) -> None:
        """Start ``out[...] = source``. The elements of ``source`` are in ``buffer``, which waits for the copy."""
        buffer.pinning.try_pin(out.device)
        stream = self._streams[out.device]
        with torch.cuda.stream(stream):
            if source.is_contiguous() and not (out.is_contiguous() and out.dtype == source.dtype):
                # Copy the bytes to the device first: it casts and rearranges faster than the host.
                landed = torch.empty(source.shape, dtype=source.dtype, device=out.device)
                copy_elements(landed, source, non_blocking=True)
                source = landed
            copy_elements(out, source, non_blocking=True)
        event: Any = stream.record_event()
        buffer.transfers.append(event.synchronize)
