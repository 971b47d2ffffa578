"""What one process keeps between saves and loads: staging memory and threads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from ..at_exit import before_exit
from ..errors import StateError
from ..planners import PlanCache
from .file_layout import FileLayout
from .merging.merge import LEAST_RING, MergeWork
from .reading.bounce import BounceRing
from .staging.arena import BLOCK, Arena

__all__ = ["MERGE_MEMORY", "Engine", "Gate"]

MERGE_MEMORY = 64 << 20
"""Bytes of the pieces that the merge stage of a process has under way, unless it is told otherwise."""

# Four writes in flight reach a virtio or NVMe disk's rate; as many again copy and hash meanwhile.
_IO_THREADS = 8
_START_S = 1.0
_MOST_COPIERS = 4  # threads that together copy as fast as a processor's memory goes
_IN_CALL_S, _TO_END_S = 5.0, 1.0  # of daemon threads, when the interpreter ends
_LOOK_EVERY_S = 0.002


def _finish(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None and alive.pid == os.getpid():
        alive.close()
        alive.wait_for_daemons()


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for it, holding nothing: whoever is interrupted would leave a lock held."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)


def _ranks_here() -> int:
    """Processes of this job on this machine, as launchers tell."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else 1


class Gate(Protocol):
    """What holds up changes of a state until that is copied."""

    def pass_through(self) -> None:
        """Return when the state may be changed."""

    def remove(self) -> None:
        """Let go of the state's objects."""


class Engine:
    """Arena, executors, and ``plans``, those of the last saves. ``io`` runs single reads, writes and hashes;
    ``background`` finishes asynchronous saves, one after the other, in the order in which they were begun; the merge
    stage has two threads and ``merge_ring``, memory of its own; ``ring`` is what reads pass through that do not go
    straight into place; ``copier`` copies behind a gate. Threads start on first use and end with ``close``."""

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = MERGE_MEMORY,
        io_threads: int = _IO_THREADS,
    ) -> None:
        if merge_memory < LEAST_RING * BLOCK:
            raise StateError(f"merge_memory is a number of bytes from {LEAST_RING * BLOCK} on, not {merge_memory!r}")
        self.pid = os.getpid()
        self.io_threads = io_threads
        self.arena = Arena(memory_budget, slots)
        self.io = ThreadPoolExecutor(io_threads, thread_name_prefix="bcp-io")
        self.background = ThreadPoolExecutor(1, thread_name_prefix="bcp-save")
        self.merge_ring = Arena(merge_memory)
        self.merge_threads = ThreadPoolExecutor(2, thread_name_prefix="bcp-merge")
        self.copier = ThreadPoolExecutor(1, thread_name_prefix="bcp-copy")
        self.plans: PlanCache[FileLayout, MergeWork] = PlanCache()
        self.ring = BounceRing()
        self._gates: list[Gate] = []
        self._callers: list[threading.Thread] = []  # daemons
        self._calls: list[threading.Thread] = []  # of these
        self._closed = False
        self._own = threading.local()
        before_exit(partial(_finish, weakref.ref(self)))

    def check_usable(self, *, waits: bool = False) -> None:
        """Raise ``StateError`` after ``close``; with ``waits``, also where the caller would wait for its own thread."""
        if self._closed:
            raise StateError("this Checkpointer was closed; make a new one")
        if waits and self.is_background_thread:
            raise StateError(
                "a synchronous save inside the done callback of a save waits for the very thread that runs the "
                "callback; use async_save=True there, or save from another thread"
            )

    @contextmanager
    def calling(self) -> Iterator[None]:
        """This thread is inside a save or a load."""
        thread = threading.current_thread()
        if not thread.daemon:
            yield
            return
        if thread not in self._callers:
            self._callers = [*filter(threading.Thread.is_alive, self._callers), thread]
        self._calls.append(thread)
        try:
            yield
        finally:
            self._calls.remove(thread)

    def wait_for_daemons(self) -> None:
        """Wait until no daemon thread is ``calling`` any more, and a moment for those to end that have called: they are
        told that no more saves are taken. Python ends daemons when they next ask for its lock, by unwinding their
        stacks; in the middle of C++ (torch lets go of the lock to compute, and to free a tensor) that is
        ``std::terminate``, and the process dies of it."""
        _until(lambda: not self._calls, _IN_CALL_S)
        _until(lambda: not any(thread.is_alive() for thread in self._callers), _TO_END_S)

    @property
    def is_background_thread(self) -> bool:
        """Whether the caller is the thread that finishes saves: in a done callback."""
        return getattr(self._own, "is_background", False)

    @property
    def copy_helpers(self) -> int:
        """How many threads may help the caller to stage: what is this rank's of the processor, and not beyond use."""
        cores = len(os.sched_getaffinity(0)) // max(1, _ranks_here())
        return max(0, min(cores, _MOST_COPIERS, self.io_threads) - 1)

    def start_threads(self) -> None:
        """Have all threads that saves use, unless they are at work already."""
        together = threading.Barrier(self.io_threads)

        def meet(_: int) -> None:
            with suppress(threading.BrokenBarrierError):  # some are at work, for longer
                together.wait(_START_S)

        single = [pool.submit(int) for pool in (self.background, self.copier)]
        list(self.io.map(meet, range(self.io_threads)))
        wait(single, _START_S)

    def add_gate(self, gate: Gate) -> None:
        """``pass_gates`` passes this one too, from now on."""
        self._gates.append(gate)

    def pass_gates(self) -> None:
        """Return when no save is copying any more what it promised to copy later. In the thread that trains."""
        while self._gates:
            gate = self._gates.pop()
            gate.pass_through()
            gate.remove()

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
        self.pass_gates()
        self.copier.shutdown(wait=True)
        self.background.shutdown(wait=True)
        self.merge_threads.shutdown(wait=True)
        self.io.shutdown(wait=True)
        self.arena.trim()
        self.ring.trim()
        self.merge_ring.trim()
