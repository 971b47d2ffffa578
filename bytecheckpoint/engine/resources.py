"""The memory and threads that a process keeps between saves and loads."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from ..errors import StateError, UsageError
from ..format.manifest import MANIFEST_TRAILER, Manifest
from ..planners import PlanCache
from ..runtime.exit import before_exit
from ..storage_backends import StorageBackend, parent_url
from .blocks import Block
from .files import FileLayout
from .merging.merge import MIN_MERGE_BLOCKS, MergeWork
from .reading.bounce import BouncePool
from .staging.arena import BLOCK, Arena

__all__ = ["DEFAULT_MERGE_MEMORY_BYTES", "IOEngine", "LastCommit"]

DEFAULT_MERGE_MEMORY_BYTES = 64 << 20
"""Default memory of the merge stage, which bounds its unfinished pieces: eight blocks."""

_IO_THREADS = 8  # four writes in flight saturate a virtio or NVMe disk, while four more threads copy and hash
_MAX_COPY_THREADS = 4  # saturate the memory bandwidth of one processor
_START_THREADS_S = 1.0  # limit for starting threads early; a busy pool has started its threads already
_DAEMON_CALL_S = 5.0  # at exit: limit for daemon threads to finish their save or load
_DAEMON_END_S = 1.0  # at exit: limit for these threads to end
_POLL_S = 0.002

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LastCommit:
    """A committed checkpoint, whose manifest has ``size`` bytes and ends in its checksum, ``trailer``.

    ``parent`` is the URL of the folder that it is in; empty if no reference could name it there.
    """

    url: str = field(repr=False)  # it may contain a password
    parent: str = field(repr=False)
    manifest: Manifest
    size: int
    trailer: bytes

    @classmethod
    def of(cls, backend: StorageBackend, manifest: Manifest, data: bytes) -> LastCommit:
        """Describe the checkpoint at the root of a backend, whose encoded manifest is ``data``."""
        return cls(backend.url, parent_url(backend), manifest, len(data), data[-MANIFEST_TRAILER:])


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
    """Owns staging memory, threads and cached plans. Threads start on first use and end with ``close``.

    Attributes:
        arena: Staging memory of saves.
        io: Runs single reads, writes and copies.
        background: Finishes asynchronous saves one after the other, in the order in which they began.
        uploads: Uploads what was saved to staging folders, one checkpoint after the other.
        copier: Copies the state of gated saves.
        faulter: Faults in staging memory ahead of its use.
        merge_arena: Memory of the merge stage.
        merge_threads: The two threads of the merge stage.
        bounce_pool: Buffers for reads that do not go straight into their tensors.
        plans: Plans of the last saves.
        last_commit: The last checkpoint that an incremental save of this process committed, on rank 0.
        store_rates: How fast the last save to each store was, in bytes per second.
    """

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = DEFAULT_MERGE_MEMORY_BYTES,
        io_threads: int = _IO_THREADS,
    ) -> None:
        if merge_memory < MIN_MERGE_BLOCKS * BLOCK:
            raise UsageError(f"merge_memory must be at least {MIN_MERGE_BLOCKS * BLOCK} bytes, not {merge_memory!r}")
        self.pid = os.getpid()
        self.io_threads = io_threads
        self.arena = Arena(memory_budget, slots)
        self.io = ThreadPoolExecutor(io_threads, thread_name_prefix="bcp-io")
        self.background = ThreadPoolExecutor(1, thread_name_prefix="bcp-save")
        self.uploads = ThreadPoolExecutor(1, thread_name_prefix="bcp-upload")
        self.merge_arena = Arena(merge_memory)
        self.merge_threads = ThreadPoolExecutor(2, thread_name_prefix="bcp-merge")
        self.copier = ThreadPoolExecutor(1, thread_name_prefix="bcp-copy")
        self.faulter = ThreadPoolExecutor(max(1, self.copy_helpers), thread_name_prefix="bcp-fault")
        self.plans: PlanCache[FileLayout, MergeWork] = PlanCache()
        self.bounce_pool = BouncePool()
        self.last_commit: LastCommit | None = None
        self.store_rates: dict[str, float] = {}
        self._daemons: list[threading.Thread] = []  # that have saved or loaded
        self._calls: list[threading.Thread] = []  # daemons inside a save or a load, once per call
        self._closed = False
        self._own = threading.local()
        before_exit(partial(_close_at_exit, weakref.ref(self)))

    def check_usable(self, *, waits: bool = False) -> None:
        """Raise ``UsageError`` after ``close``, in a forked child (which has none of the threads), or if the background
        thread would wait for itself (``waits``)."""
        if self.pid != os.getpid():
            raise UsageError(
                "the threads of this Checkpointer, or of the one that opened this checkpoint, are in the process that "
                "this one was forked from; open the checkpoint, or create the Checkpointer, in this process"
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed; create a new one")
        if waits and self.is_background_thread:
            raise UsageError(
                "a synchronous save inside the done callback of another save would wait for the thread that runs the "
                "callback; use async_save=True there, or save from another thread"
            )

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """Mark the calling thread as being inside a save or a load."""
        thread = threading.current_thread()
        if not thread.daemon:
            yield
            return
        if thread not in self._daemons:
            self._daemons = [*filter(threading.Thread.is_alive, self._daemons), thread]
        self._calls.append(thread)
        try:
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
    def is_background_thread(self) -> bool:
        """Whether the calling thread is the background thread, as in a save's done callback."""
        return getattr(self._own, "is_background", False)

    @property
    def copy_helpers(self) -> int:
        """Threads that may help the caller to copy: this rank's share of the processors, minus the caller."""
        return max(0, min(self.cores, _MAX_COPY_THREADS) - 1)

    @property
    def cores(self) -> int:
        """This rank's share of the processors, at most one for each I/O thread and at least one."""
        return max(1, min(len(os.sched_getaffinity(0)) // max(1, _local_world_size()), self.io_threads))

    def start_threads(self) -> None:
        """Start all threads that saves use."""
        barrier = threading.Barrier(self.io_threads)

        def wait_for_others(_: int) -> None:
            with suppress(threading.BrokenBarrierError):  # some threads are busy
                barrier.wait(_START_THREADS_S)

        single = [pool.submit(int) for pool in (self.background, self.copier)]
        list(self.io.map(wait_for_others, range(self.io_threads)))
        wait(single, _START_THREADS_S)

    def grow_arena(self, goal: int, prepare: Callable[[Block], None] | None = None) -> None:
        """Fault in staging memory in the background until the arena has ``goal`` blocks; pass each to ``prepare``."""

        def add_blocks() -> None:
            try:
                while not self._closed and self.arena.add(goal, prepare):
                    pass
            except Exception as error:  # noqa: BLE001 - a save makes do with the blocks that exist
                _log.warning("staging memory stays at %d bytes: %s", self.arena.nbytes, error)

        if self.arena.blocks < goal:
            with suppress(RuntimeError):  # closed: the save itself fails
                for _ in range(max(1, self.copy_helpers)):
                    self.faulter.submit(add_blocks)

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Queue ``task`` for the background thread. Raises ``StateError`` after ``close``."""
        try:
            return self.background.submit(self._in_background, task)
        except RuntimeError as error:
            raise StateError(f"the save cannot continue in the background: {error}") from error

    def _in_background(self, task: Callable[[], None]) -> None:
        self._own.is_background = True
        task()

    def close(self) -> None:
        """Finish all saves and uploads in flight, end the threads and release the memory."""
        self._closed = True
        self.faulter.shutdown(wait=True)  # stops before the next block
        self.copier.shutdown(wait=True)
        self.background.shutdown(wait=True)
        self.uploads.shutdown(wait=True)
        self.merge_threads.shutdown(wait=True)
        self.io.shutdown(wait=True)
        self.arena.trim()
        self.bounce_pool.trim()
        self.merge_arena.trim()
