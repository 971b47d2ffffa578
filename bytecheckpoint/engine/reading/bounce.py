"""Bounce buffers: memory that bytes pass through between a store and their tensors, reused from load to load."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..blocks import Block, page_round
from ..tensor_bytes import copy_memory

BOUNCE_BYTES = 128 << 20
"""Default limit for all bounce buffers of a process: eight reads of 16 MiB, one for each I/O thread."""


class BounceBuffer(Block):
    """One buffer, faulted in. For one thread at a time.

    ``transfers`` holds a function for each asynchronous copy out of the buffer; it waits until the copy is done.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.transfers: list[Callable[[], object]] = []
        self.fault_in(nbytes)

    def synchronize(self) -> None:
        """Wait for all copies out of the buffer."""
        for wait in self.transfers:
            wait()
        self.transfers.clear()

    def copy_out(self, start: int, nbytes: int, address: int) -> None:
        """Copy ``nbytes`` from byte ``start`` on to an address. The caller keeps that memory alive."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise IndexError(f"bytes [{start}, {start + nbytes}) of a bounce buffer of {self.nbytes}")
        copy_memory(address, self.address + start, nbytes)


class BouncePool:
    """Lends buffers of at most ``limit`` bytes in total, and keeps them for the next load. Thread-safe."""

    def __init__(self, limit: int = BOUNCE_BYTES) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._idle: list[BounceBuffer] = []
        self._lent = 0  # bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, lent and idle."""
        with self._changed:
            return self._lent + self._idle_nbytes()

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[BounceBuffer]:
        """Lend a buffer of at least ``nbytes``, preferably the one that was used last.

        Waits for another buffer to return if the limit is reached. A buffer that exceeds the limit is lent only while
        no other one is. To avoid a deadlock, a thread must not request a second buffer.
        """
        buffer = self._acquire(page_round(nbytes))
        try:
            yield buffer
        finally:
            try:
                buffer.synchronize()
            finally:
                self._release(buffer)

    def trim(self) -> None:
        """Return all idle buffers to the system."""
        with self._changed:
            self._idle.clear()

    def _acquire(self, nbytes: int) -> BounceBuffer:
        with self._changed:
            self._changed.wait_for(lambda: not self._lent or self._lent + nbytes <= self.limit)
            fitting = [buffer for buffer in self._idle if buffer.nbytes >= nbytes]
            if fitting and self._lent + fitting[-1].nbytes <= max(self.limit, nbytes):
                buffer = fitting[-1]
                self._idle.remove(buffer)
            else:
                while self._idle and self._lent + nbytes + self._idle_nbytes() > self.limit:
                    self._idle.pop(0)
                buffer = BounceBuffer(nbytes)
            self._lent += buffer.nbytes
            return buffer

    def _release(self, buffer: BounceBuffer) -> None:
        with self._changed:
            self._lent -= buffer.nbytes
            if self._lent + buffer.nbytes + self._idle_nbytes() <= self.limit:
                self._idle.append(buffer)
            self._changed.notify_all()

    def _idle_nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._idle)
