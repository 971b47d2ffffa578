"""Wait for changes that other threads make, although ctrl-C may interrupt a waiting thread at any moment."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import ThreadError
from .threads import is_ending, run_daemon

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


_CANCEL_EVERY_S = 0.2

_requests: dict[Future[Any], float] = {}  # and when each has begun


def track_request(request: Future[Any]) -> None:
    """Let ``cancelling_requests`` cancel a request to a store while it runs."""
    _requests[request] = time.monotonic()
    request.add_done_callback(lambda request: _requests.pop(request, None))


@contextmanager
def cancelling_requests(after_s: float, *, silent_s: float = 0.0) -> Iterator[None]:
    """Give requests to stores so many seconds, also those that the block begins, and cancel them then.

    For a process that is about to exit: each request of a silent store would hold it up for a whole deadline. With
    ``silent_s``, they are cancelled only once one has been running for so long, then or later. The end of the block
    waits for the requests of earlier, until they are cancelled. If no thread can start, none is.
    """
    end, earlier, has_ended = time.monotonic() + after_s, tuple(_requests), threading.Event()

    def cancel() -> None:
        pause_s, is_silent = after_s, False
        while not has_ended.wait(pause_s):
            pause_s = _CANCEL_EVERY_S
            running = tuple(_requests.items())
            is_silent |= any(time.monotonic() - begun >= silent_s for _, begun in running)
            for request, _ in running if is_silent else ():
                request.cancel()

    with suppress(ThreadError):
        if not is_ending():  # or it would run here
            run_daemon(cancel, "bcp-leaving")
    try:
        yield
        wait(earlier, max(0.0, end - time.monotonic()) + _CANCEL_EVERY_S)
    finally:
        has_ended.set()
