"""Memory from which checkpoint-engine's workers read tensors. The CUDA buckets have never run on a GPU.

There are two buckets: the sender fills one while the workers load the other.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ....errors import EngineError, StateError
from ..transports.cuda_ipc import GPU_PREFIX, visible_gpus
from ..transports.shared_memory import Arena
from .update import Handle

__all__ = ["Buckets", "align_tensor", "gpus_of", "make_buckets"]

_ALIGNMENT_BYTES = 256  # what checkpoint-engine uses
_MIG_PREFIX = "MIG-"


def align_tensor(nbytes: int) -> int:
    """Round up to the alignment of tensors in a bucket."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Buckets(ABC):
    """Two buckets of ``nbytes`` each. The ``handles``, one for each worker, are valid until ``close``."""

    def __init__(self, memory: torch.Tensor, handles: list[Handle]) -> None:
        self._memory, self.handles = memory, handles
        self.nbytes = len(memory) // 2

    def bucket(self, number: int) -> torch.Tensor:
        """Return the host memory of bucket 0 or 1, to fill when no worker reads it."""
        return self._memory[number * self.nbytes : (number + 1) * self.nbytes]

    def publish(self, number: int, nbytes: int) -> None:  # noqa: B027 - workers on CPUs map the same memory
        """Make the first ``nbytes`` of a bucket visible to the workers. Returns when they are."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. May be called again."""


class HostBuckets(Buckets):
    """For workers on CPUs: one shared memory for all of them."""

    def __init__(self, workers: int, nbytes: int) -> None:
        self._arena = Arena(2 * nbytes)
        address = self._arena.address
        rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        super().__init__(self._arena.memory, [(rebuild, (path, True, address.nbytes))] * workers)

    def close(self) -> None:
        self._arena.close()
        self._memory = torch.empty(0, dtype=torch.uint8)


class CudaBuckets(Buckets):
    """For workers on GPUs: buckets on each GPU, filled from pinned host memory. Never run on a GPU."""

    def __init__(self, gpus: Sequence[int], nbytes: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        refuse_expandable_segments()
        host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers = [torch.empty(2 * nbytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
        super().__init__(host, [reduce_tensor(buffer) for buffer in self._buffers])  # type: ignore[no-untyped-call]

    def publish(self, number: int, nbytes: int) -> None:
        span = slice(number * self.nbytes, number * self.nbytes + nbytes)
        for buffer in self._buffers:
            buffer[span].copy_(self._memory[span], non_blocking=True)
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)

    def close(self) -> None:
        if self._buffers:
            self._buffers.clear()
            self.handles.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # engines leave little memory free


def refuse_expandable_segments() -> None:
    """Raise ``StateError`` if torch's allocator is to use memory that has no CUDA IPC handles."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = os.environ.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            raise StateError(
                f"{name} has expandable_segments:True, and workers cannot open such memory; remove it from the "
                f"environment of this process, or push with HttpEngine, which shares host memory"
            )


def gpus_of(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs with these names; none if the names are of CPUs. Raises ``StateError`` for a GPU
    that this process does not see."""
    if not any(device.startswith((GPU_PREFIX, _MIG_PREFIX)) for device in devices):
        return []
    visible = visible_gpus()
    # A part of a GPU (MIG) is "MIG-<uuid>" for nvidia-smi and NVML. That CUDA has the same UUID for it is unverified;
    # tests/gpu/test_names_of_devices.py compares them. If it has not, such a part is refused as not visible.
    found = [device.replace(_MIG_PREFIX, GPU_PREFIX, 1) for device in devices]
    missing = [device for device, name in zip(devices, found, strict=True) if name not in visible]
    if missing:
        raise StateError(
            f"this process does not see {', '.join(missing)}, only {', '.join(visible) or 'no GPU'}; it must run on "
            "the engine's host, with a CUDA build of torch, and CUDA_VISIBLE_DEVICES must have the engine's GPUs"
        )
    return [visible[name] for name in found]


def make_buckets(devices: Sequence[str], most: int, least: int) -> Buckets:
    """Make buckets for a worker on each device, of ``most`` bytes, or of less where memory is short.

    Raises ``EngineError`` when memory does not suffice for ``least``, and ``StateError`` like ``gpus_of``.
    """
    gpus, nbytes = gpus_of(devices), most
    while True:
        try:
            return CudaBuckets(gpus, nbytes) if gpus else HostBuckets(len(devices), nbytes)
        except (EngineError, RuntimeError) as error:  # torch raises the latter when memory is short
            if nbytes <= least:
                raise EngineError(
                    f"no memory for two buckets of {nbytes:,} bytes, the size of the largest tensor, on "
                    f"{', '.join(devices)} and on the host; the engine must leave that much ({error})"
                ) from error
            nbytes = max(align_tensor(nbytes // 2), least)
        if gpus:
            torch.cuda.empty_cache()
