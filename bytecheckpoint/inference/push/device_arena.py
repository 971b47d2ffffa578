"""Arenas in the memory of a worker's device, which senders on its host write to from device to device.

How to open one stands on a card: a small arena in host memory (``arena.py``), which only processes of the same user
reach. Who has the memory open holds a lock on the card, which the kernel lets go when that process ends, however it
does. CUDA must not be given memory back that others have open, as a sender may that was stopped in the middle of a
push: a thread waits until they have ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from weakref import WeakValueDictionary

import msgpack
import torch

from ...errors import EngineError
from . import device_memory
from .arena import Address, Arena, open_arena
from .device_memory import DeviceMemory

__all__ = ["DeviceArena", "OpenArena", "attach_device"]

_log = logging.getLogger(__name__)

_own: WeakValueDictionary[str, DeviceArena] = WeakValueDictionary()  # CUDA opens no memory of its own process


class DeviceArena:
    """``nbytes`` of this worker's device. Raises ``StateError`` where it has none, ``EngineError`` where there is no
    memory that can be shared."""

    def __init__(self, nbytes: int) -> None:
        self._device = device_memory.memory_here()
        self.memory = self._device.take(nbytes)
        try:
            card = msgpack.packb([self._device.name, self._device.handle(self.memory), nbytes])
            self._card = Arena(len(card))
        except BaseException:
            self._device.give_back(self.memory)
            raise
        self._is_closed = False
        self._card.memory.copy_(torch.frombuffer(bytearray(card), dtype=torch.uint8))
        _own[self._card.token] = self

    @property
    def address(self) -> Address:
        """Of the card."""
        return self._card.address

    def close(self) -> None:
        """Give the memory back, now or when nobody has it open any more. No view of it may be used after this."""
        if self._is_closed:
            return
        self._is_closed = True
        _own.pop(self._card.token, None)
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        try:
            fcntl.flock(self._card.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A daemon, as the interpreter must be able to end while a sender is stopped.
            threading.Thread(target=self._give_back_later, args=(memory,), name="bcp-push-arena", daemon=True).start()
        else:
            self._give_back(memory)

    def _give_back_later(self, memory: torch.Tensor) -> None:
        fcntl.flock(self._card.descriptor, fcntl.LOCK_EX)
        self._give_back(memory)

    def _give_back(self, memory: torch.Tensor) -> None:
        """This has the lock. Who has the card open already, and locks it next, finds nothing on it."""
        self._card.memory.zero_()
        self._card.close()
        try:
            self._device.give_back(memory)
        except (EngineError, RuntimeError):
            _log.warning("push: %d bytes of %s are lost", memory.numel(), self._device.name, exc_info=True)


class OpenArena:
    """Another process's arena, which stays until this is closed."""

    def __init__(self, descriptor: int, memory: torch.Tensor, device: DeviceMemory | None) -> None:
        self._descriptor, self._device = descriptor, device
        self.memory = memory

    def close(self) -> None:
        """No view of the memory may be used after this. Never raises."""
        if self._descriptor >= 0:
            memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
            try:
                if self._device is not None:
                    self._device.shut(memory)
            except (EngineError, RuntimeError):
                _log.warning("push: a worker's memory stays open here", exc_info=True)
            finally:
                _leave(self._descriptor)
                self._descriptor = -1


def attach_device(address: Address) -> OpenArena | None:
    """None where this process does not reach it: another host, user or container, a device that it does not see, or an
    arena that is gone."""
    descriptor = open_arena(address)
    if descriptor is None:
        return None
    try:
        found = _opened(address, descriptor)
    except BaseException:
        _leave(descriptor)
        raise
    if found is None:
        _leave(descriptor)
    return found


def _opened(address: Address, descriptor: int) -> OpenArena | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    own = _own.get(address.token)
    if own is not None:
        return OpenArena(descriptor, own.memory, None)
    card = os.pread(descriptor, address.nbytes, 0)
    if not card.strip(b"\0"):
        return None  # it has been given back
    name, handle, nbytes = msgpack.unpackb(card)
    device = device_memory.memory_of(name)
    if device is None:
        _log.warning("push: %s is on this host, but not visible here (CUDA_VISIBLE_DEVICES); using TCP", name)
        return None
    try:
        return OpenArena(descriptor, device.open(handle, nbytes), device)
    except (EngineError, RuntimeError) as error:  # torch makes a context on the device, which takes memory
        _log.warning("push: %s; using TCP", error)
        return None


def _leave(descriptor: int) -> None:
    # The lock by name, as processes that were forked meanwhile have the descriptor too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
