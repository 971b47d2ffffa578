"""The parts of large objects in flight: how many there may be, and their memory."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

__all__ = ["PARTS_IN_FLIGHT", "Window"]

PARTS_IN_FLIGHT = 8
_FILLING = 2  # buffers that are being filled, in addition to those in flight: one for each open file of a save


class Window:
    """Slots and buffers for the parts of all writers of a process. Thread-safe.

    Buffers are reused while there is a writer, because filling fresh memory costs several times as much as a copy into
    memory that is in use. They are mapped, on huge pages, and not allocated: an allocator would keep their memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers = self._in_flight = self._taken = self._sent = 0
        self._idle: list[mmap.mmap] = []

    def enter(self) -> None:
        """Count a writer."""
        with self._changed:
            self._writers += 1

    def leave(self) -> None:
        """Forget a writer. The last one frees the memory."""
        with self._changed:
            self._writers -= 1
            if not self._writers:
                self._idle.clear()

    def take_buffer(self, nbytes: int, timeout_s: float) -> mmap.mmap | None:
        """Return a buffer, and wait before while there are many and parts in flight will release some.

        A caller whose parts are all incomplete does not wait, so that it can write them in any order. Returns None if
        none became free in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._taken < PARTS_IN_FLIGHT + _FILLING or not self._sent, timeout=timeout_s
            ):
                return None
            self._taken += 1
            for at, buffer in enumerate(self._idle):
                if len(buffer) == nbytes:
                    return self._idle.pop(at)
        fresh = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not on every system
            fresh.madvise(mmap.MADV_HUGEPAGE)
        return fresh

    def give_back(self, buffer: mmap.mmap) -> None:
        """Take back a buffer that nothing uses any more."""
        with self._changed:
            if self._writers and len(self._idle) < PARTS_IN_FLIGHT + _FILLING:
                self._idle.append(buffer)
        self.forget(1)

    def forget(self, count: int) -> None:
        """Count buffers as returned that no other writer may get, because a thread may still be writing into them."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    def acquire_slot(self, timeout_s: float, *, with_buffer: bool = False) -> bool:
        """Wait for a slot, to send a part in a buffer or in the caller's memory.

        Returns false if none became free in time.
        """
        with self._changed:
            is_free = self._changed.wait_for(lambda: self._in_flight < PARTS_IN_FLIGHT, timeout=timeout_s)
            self._in_flight += is_free
            self._sent += is_free and with_buffer
        return is_free

    def release_slot(self, *, with_buffer: bool = False) -> None:
        """Release a slot of ``acquire_slot``, with the same argument."""
        with self._changed:
            self._in_flight -= 1
            self._sent -= with_buffer
            self._changed.notify_all()
