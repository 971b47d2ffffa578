"""A stand-in for a device whose memory processes share: it lies in host memory, and nobody but the device may touch it.

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
from bytecheckpoint.inference.push import device_memory
from bytecheckpoint.inference.push.arena import Address, Arena, attach
from bytecheckpoint.inference.push.device_memory import DeviceMemory

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
    """By this thread, and not done yet."""
    if not hasattr(_own, "asked"):
        _own.asked = []
    found: list[Callable[[], None]] = _own.asked
    return found


class _Stream:
    def synchronize(self) -> None:
        while _asked():
            _asked().pop(0)()


class HostDevice(DeviceMemory):
    """``taken`` and ``opened``: by this process, and not given back."""

    name = "GPU-of-the-host"
    taken: dict[int, Arena] = {}
    opened: set[int] = set()
    refusal: type[Exception] | None = None
    """What other processes get that open it."""

    def take(self, nbytes: int) -> torch.Tensor:
        arena = Arena(nbytes)
        self.taken[arena.memory.data_ptr()] = arena
        return arena.memory.as_subclass(_OnDevice)

    def give_back(self, memory: torch.Tensor) -> None:
        self.taken.pop(memory.data_ptr()).close()

    def handle(self, memory: torch.Tensor) -> bytes:
        packed: bytes = msgpack.packb(self.taken[memory.data_ptr()].address.plain())
        return packed

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        memory = attach(Address.from_plain(msgpack.unpackb(handle)))
        if HostDevice.refusal is not None:
            raise HostDevice.refusal("it cannot be opened")
        if memory is None:
            raise EngineError("the device does not know that handle")
        self.opened.add(memory.data_ptr())
        return memory.as_subclass(_OnDevice)

    def shut(self, memory: torch.Tensor) -> None:
        self.opened.remove(memory.data_ptr())


def _named(name: str) -> DeviceMemory | None:
    return HostDevice() if name == HostDevice.name else None


@contextmanager
def host_device() -> Iterator[None]:
    """This process has the device meanwhile."""
    before = device_memory.memory_here, device_memory.memory_of, torch.cuda.current_stream
    device_memory.memory_here, device_memory.memory_of = HostDevice, _named
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        device_memory.memory_here, device_memory.memory_of, torch.cuda.current_stream = before
