"""The parts in flight: how many there may be, and their memory."""

from __future__ import annotations

import threading

__all__ = ["PARTS_IN_FLIGHT", "Window"]

PARTS_IN_FLIGHT = 8
_FILLING = 4  # buffers that are being filled, in addition to those in flight


class Window:
    """Slots and buffers for the parts of all writers of a process. Thread-safe.

    Buffers are reused while there is a writer, because filling fresh memory costs several times as much as a copy into
    memory that is in use.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(PARTS_IN_FLIGHT)
        self._lock = threading.Lock()
        self._writers = 0
        self._idle: list[bytearray] = []

    def enter(self) -> None:
        """Count a writer."""
        with self._lock:
            self._writers += 1

    def leave(self) -> None:
        """Forget a writer. The last one frees the memory."""
        with self._lock:
            self._writers -= 1
            if not self._writers:
                self._idle.clear()

    def take_buffer(self, nbytes: int) -> bytearray:
        with self._lock:
            for at, buffer in enumerate(self._idle):
                if len(buffer) == nbytes:
                    return self._idle.pop(at)
        return bytearray(nbytes)

    def give_back(self, buffer: bytearray) -> None:
        """Take back a buffer that nothing uses any more."""
        with self._lock:
            if self._writers and len(self._idle) < PARTS_IN_FLIGHT + _FILLING:
                self._idle.append(buffer)

    def acquire_slot(self, timeout_s: float) -> bool:
        """Wait for a slot. Returns false if none became free in time."""
        return self._slots.acquire(timeout=timeout_s)

    def release_slot(self) -> None:
        self._slots.release()
