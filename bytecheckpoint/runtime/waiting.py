"""Wait for changes that other threads make, although ctrl-C may interrupt a waiting thread at any moment."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress

# A signal that arrives just before a thread blocks does not interrupt that wait: wait in slices.
_SIGNAL_CHECK_S = 1.0


class Waiters:
    """The threads that wait for a change of one object.

    A ``threading.Condition`` cannot be used: an interrupt inside its ``__enter__`` leaves its lock held for ever, and
    then the thread that makes the change hangs. A waiter of this class holds no lock while it waits.
    """

    def __init__(self) -> None:
        self._queues: set[queue.SimpleQueue[None]] = set()

    def wake(self) -> None:
        """Let all waiters check their conditions. Call it after each change, with or without the object's lock."""
        for wake in tuple(self._queues):
            wake.put(None)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds, which this thread checks after each change; return whether it does."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._queues.add(wake)
        try:
            while not condition():
                left_s = _SIGNAL_CHECK_S if give_up is None else give_up - time.monotonic()
                if left_s <= 0:
                    return False
                with suppress(queue.Empty):
                    wake.get(timeout=min(left_s, _SIGNAL_CHECK_S))
            return True
        finally:
            self._queues.discard(wake)
