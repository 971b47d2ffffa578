"""The threads and buffers that a process keeps for its reads and writes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ..errors import UsageError
from ..runtime.modes import default_modes
from ..runtime.threads import Threads, before_exit, check_not_ending
from .reading.bounce import BouncePool

_IO_THREADS = 8  # four writes in flight saturate a virtio or NVMe disk, while four more threads copy and hash
_DAEMON_CALL_S = 5.0  # at exit: limit for daemon threads to finish their save or load
_DAEMON_END_S = 1.0  # at exit: limit for these threads to end
_POLL_S = 0.002


def _close_at_exit(engine: weakref.ref[IOEngine]) -> None:
    alive = engine()
    if alive is not None and alive.pid == os.getpid():
        alive.close()
        alive.wait_for_daemons()


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll ``condition``. Holds no lock: an interrupt at exit would leave it held."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(_POLL_S)


def _local_world_size() -> int:
    """Return the number of this job's ranks on this machine, which launchers set; 1 if they do not."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1


class IOEngine:
    """Owns the threads that read and write, and refuses use after a fork or ``close``. Threads start on first use.

    What only saves need is in ``save.engine.SaveEngine``.

    Attributes:
        io: Runs single reads, writes and copies.
        io_threads: The number of its threads.
        bounce_pool: Buffers for reads that do not go straight into their tensors.
        pid: The process whose threads these are.
    """

    def __init__(self, *, io_threads: int = _IO_THREADS) -> None:
        self.pid = os.getpid()
        self.io_threads = io_threads
        self.io = Threads(io_threads, thread_name_prefix="bcp-io")
        self.bounce_pool = BouncePool()
        self._daemons: list[threading.Thread] = []  # that have saved or loaded
        self._calls: list[threading.Thread] = []  # daemons inside a save or a load, once per call
        self._closed = False
        before_exit(partial(_close_at_exit, weakref.ref(self)))

    def check_usable(self) -> None:
        """Raise ``UsageError`` after ``close``, and in a forked child, which has none of the threads."""
        if self.pid != os.getpid():
            raise UsageError(
                "the threads of this Checkpointer, or of the one that opened this checkpoint, are in the process that "
                "this one was forked from; open the checkpoint, or create the Checkpointer, in this process"
            )
        if self._closed:
            check_not_ending()
            raise UsageError("this Checkpointer is closed; create a new one")

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """Mark the calling thread as being inside a save or a load, and isolate it from the caller's modes of torch."""
        thread = threading.current_thread()
        if not thread.daemon:
            with default_modes():
                yield
            return
        if thread not in self._daemons:
            self._daemons = [*filter(threading.Thread.is_alive, self._daemons), thread]
        self._calls.append(thread)
        try:
            with default_modes():
                yield
        finally:
            self._calls.remove(thread)

    def wait_for_daemons(self) -> None:
        """Give daemon threads time to leave their saves and loads, and then to end, because their next call fails.

        At exit, Python ends a daemon thread when it next acquires the GIL, by unwinding its stack. If the thread is
        inside C++ code then (torch releases the GIL to compute, and to free a tensor), the unwinding calls
        ``std::terminate``, which kills the process.
        """
        _wait_until(lambda: not self._calls, _DAEMON_CALL_S)
        _wait_until(lambda: not any(thread.is_alive() for thread in self._daemons), _DAEMON_END_S)

    @property
    def cores(self) -> int:
        """This rank's share of the processors, at most one for each I/O thread and at least one."""
        return max(1, min(len(os.sched_getaffinity(0)) // max(1, _local_world_size()), self.io_threads))

    def close(self) -> None:
        """End the threads when they have finished, and release the memory."""
        self._closed = True
        self.io.shutdown(wait=True)
        self.bounce_pool.trim()
