"""A stand-in for a device with shared memory: it uses host memory that only the device may access.

Nothing gets there but by copies, and who does not wait for these has not made them. There is one such device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import torch

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push.transports import cuda_ipc as device_memory
from bytecheckpoint.inference.push.transports.cuda_ipc import DeviceMemory
from bytecheckpoint.inference.push.transports.shared_memory import ArenaAddress, SharedArena, attach

__all__ = ["HostDevice", "host_device"]

_own = threading.local()


class _OnDevice(torch.Tensor):
    is_cuda = True

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert the device's tensor to numpy")

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        def copy() -> None:
            torch.Tensor.copy_(self, source)

        if non_blocking:
            _asked().append(copy)
        else:
            copy()
        return self


def _asked() -> list[Callable[[], None]]:
    """Return the copies that this thread has queued."""
    if not hasattr(_own, "asked"):
        _own.asked = []
    found: list[Callable[[], None]] = _own.asked
    return found


class _Stream:
    def synchronize(self) -> None:
        while _asked():
            _asked().pop(0)()


class HostDevice(DeviceMemory):
    """``taken`` and ``opened`` list what this process has not freed or closed yet."""

    name = "GPU-of-the-host"
    taken: dict[int, SharedArena] = {}
    opened: set[int] = set()
    refusal: type[Exception] | None = None
    """The error that opening raises."""

    def __init__(self) -> None:
        """Do nothing: there is one such device."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        arena = SharedArena(nbytes)
        self.taken[arena.memory.data_ptr()] = arena
        return arena.memory.as_subclass(_OnDevice)

    def free(self, memory: torch.Tensor) -> None:
        self.taken.pop(memory.data_ptr()).close()

    def handle(self, memory: torch.Tensor) -> bytes:
        packed: bytes = msgpack.packb(self.taken[memory.data_ptr()].address)
        return packed

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        memory = attach(ArenaAddress(*msgpack.unpackb(handle)))
        if HostDevice.refusal is not None:
            raise HostDevice.refusal("it cannot be opened")
        if memory is None:
            raise EngineError("the device does not know that handle")
        self.opened.add(memory.data_ptr())
        return memory.as_subclass(_OnDevice)

    def close(self, memory: torch.Tensor) -> None:
        self.opened.remove(memory.data_ptr())


def _named(name: str) -> DeviceMemory | None:
    return HostDevice() if name == HostDevice.name else None


@contextmanager
def host_device() -> Iterator[None]:
    """Give this process the device."""
    before = device_memory.current_device_memory, device_memory.device_memory_named, torch.cuda.current_stream
    device_memory.current_device_memory, device_memory.device_memory_named = HostDevice, _named
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        device_memory.current_device_memory, device_memory.device_memory_named, torch.cuda.current_stream = before
