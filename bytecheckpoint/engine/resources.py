"""What one process keeps between saves and loads: staging memory and threads."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..errors import StateError
from .arena import Arena

__all__ = ["Engine"]

_IO_THREADS = 4  # queue depth at which O_DIRECT reaches a virtio or NVMe disk's rate


# Executors take no more work once the interpreter begins to shut down, which is before atexit functions run; a save in
# flight must finish before that. Python's own executors register here too, and the last registered runs first.
_at_exit = getattr(threading, "_register_atexit", atexit.register)


def _finish(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None and alive.pid == os.getpid():
        alive.close()


class Engine:
    """Arena and executors. ``io`` runs single reads, writes and hashes; ``background`` finishes asynchronous saves, one
    after the other, in the order in which they were begun. Threads start on first use and end with ``close``."""

    def __init__(self, *, memory_budget: int | None = None, io_threads: int = _IO_THREADS) -> None:
        self.pid = os.getpid()
        self.arena = Arena(memory_budget)
        self.io = ThreadPoolExecutor(io_threads, thread_name_prefix="bcp-io")
        self.background = ThreadPoolExecutor(1, thread_name_prefix="bcp-save")
        self._closed = False
        self._own = threading.local()
        _at_exit(_finish, weakref.ref(self))

    def check_usable(self, *, waits: bool = False) -> None:
        """Raise ``StateError`` after ``close``; with ``waits``, also where the caller would wait for its own thread."""
        if self._closed:
            raise StateError("this Checkpointer was closed; make a new one")
        if waits and getattr(self._own, "is_background", False):
            raise StateError(
                "a synchronous save inside the done callback of a save waits for the very thread that runs the "
                "callback; use async_save=True there, or save from another thread"
            )

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Queue ``task`` for the background thread. Raises ``StateError`` where no more work is taken."""
        try:
            return self.background.submit(self._in_background, task)
        except RuntimeError as error:
            raise StateError(f"the save cannot go on in the background: {error}") from error

    def _in_background(self, task: Callable[[], None]) -> None:
        self._own.is_background = True
        task()

    def close(self) -> None:
        """Finish every save in flight, then end the threads and give the memory back."""
        self._closed = True
        self.background.shutdown(wait=True)
        self.io.shutdown(wait=True)
        self.arena.trim()
