"""What one process keeps between saves and loads: staging memory and threads."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

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
        _at_exit(_finish, weakref.ref(self))

    def close(self) -> None:
        """Finish every save in flight, then end the threads and give the memory back."""
        self.background.shutdown(wait=True)
        self.io.shutdown(wait=True)
        self.arena.trim()
