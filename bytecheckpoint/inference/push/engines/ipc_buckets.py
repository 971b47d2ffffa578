"""Memory that the workers of an engine read whole tensors from: two buckets, one filled while the other is put in."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import EngineError, StateError
from .arena import Arena
from .device_memory import GPU_PREFIX, gpus_here

__all__ = ["ALIGNMENT", "Buckets", "Handle", "aligned", "gpus_of", "make_buckets"]

ALIGNMENT = 256  # bytes

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""By calling the one with the other, a worker gets the memory of both buckets, as one tensor of bytes."""


class Buckets(ABC):
    """``handles``, one for each worker, hold for as long as this is not closed."""

    handles: list[Handle]

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Of one bucket."""

    @abstractmethod
    def bucket(self, number: int) -> torch.Tensor:
        """Host memory of bucket 0 or 1, to fill when no worker needs what was in it."""

    @abstractmethod
    def show(self, number: int, nbytes: int) -> None:
        """Make so many bytes of a bucket what workers see. Returns when they do."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. May be called again."""


class HostBuckets(Buckets):
    """For workers on CPUs: one memory for all of them, which is filled in place."""

    def __init__(self, workers: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._arena = Arena(2 * nbytes)
        address = self._arena.address
        rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        self.handles = [(rebuild, (path, True, address.nbytes))] * workers

    def bucket(self, number: int) -> torch.Tensor:
        return self._arena.memory[number * self.nbytes : (number + 1) * self.nbytes]

    def show(self, number: int, nbytes: int) -> None:
        """They do."""

    def close(self) -> None:
        self._arena.close()


class CudaBuckets(Buckets):
    """For workers on GPUs: each has the buckets in its own memory, filled from pinned memory of the host."""

    def __init__(self, gpus: Sequence[int], nbytes: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        super().__init__(nbytes)
        self._host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers = [torch.empty(2 * nbytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
        self.handles = [reduce_tensor(buffer) for buffer in self._buffers]  # type: ignore[no-untyped-call]

    def bucket(self, number: int) -> torch.Tensor:
        return self._host[number * self.nbytes : (number + 1) * self.nbytes]

    def show(self, number: int, nbytes: int) -> None:
        span = slice(number * self.nbytes, number * self.nbytes + nbytes)
        for buffer in self._buffers:
            buffer[span].copy_(self._host[span], non_blocking=True)
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)

    def close(self) -> None:
        if self._buffers:
            self._buffers.clear()
            self.handles.clear()
            self._host = torch.empty(0, dtype=torch.uint8)
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # engines leave little memory free


def gpus_of(devices: Sequence[str]) -> list[int]:
    """The GPUs of these names; none where the names are of CPUs. Raises ``StateError`` for what is not here."""
    if not any(device.startswith(GPU_PREFIX) for device in devices):
        return []
    here = gpus_here()
    missing = [device for device in devices if device not in here]
    if missing:
        raise StateError(
            f"this process does not see {', '.join(missing)}, only {', '.join(here) or 'no GPU'}; it must run on the "
            "engine's host, with a CUDA build of torch, and CUDA_VISIBLE_DEVICES must have the engine's GPUs"
        )
    return [here[device] for device in devices]


def make_buckets(devices: Sequence[str], most: int, least: int) -> Buckets:
    """For a worker on each of the ``devices``: of ``most`` bytes, or as many less as it takes for memory to suffice.
    Raises ``EngineError`` where it does not for ``least``, and as ``gpus_of``."""
    gpus, nbytes = gpus_of(devices), most
    while True:
        try:
            return CudaBuckets(gpus, nbytes) if gpus else HostBuckets(len(devices), nbytes)
        except (EngineError, RuntimeError) as error:  # torch's lack of memory is one of the latter
            if nbytes <= least:
                raise EngineError(
                    f"no memory for two buckets of {nbytes:,} bytes, which the longest tensor takes, on "
                    f"{', '.join(devices)} and on the host; the engine must leave so much ({error})"
                ) from error
            nbytes = max(aligned(nbytes // 2), least)
        if gpus:
            torch.cuda.empty_cache()


def aligned(nbytes: int) -> int:
    """So many, or a few more."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
