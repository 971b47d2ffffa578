"""Waiting for another thread in a way that ctrl-C can break off at any moment."""

from __future__ import annotations

import threading

__all__ = ["Latch"]

_LOOK_EVERY_S = 1.0


class Latch:
    """Set once, by one thread, perhaps with an error; waited for by another.

    An interrupt that comes while a ``Condition`` (and so a ``Future`` or an ``Event``) is entered leaves its lock held
    for ever, and then whoever would set it hangs. Here the waiter holds nothing that the other thread needs.
    """

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()
        self._is_set = False
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        self._error, self._is_set = error, True
        self._shut.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        """Return when it is set."""
        while not self._is_set:
            self._shut.acquire(timeout=_LOOK_EVERY_S)

    def result(self) -> None:
        """``wait``, then raise the error that it was set with."""
        self.wait()
        if self._error is not None:
            raise self._error
