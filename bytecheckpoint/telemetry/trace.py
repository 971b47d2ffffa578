"""Named steps: what is timed, what is logged, what a trace shows, and where tests inject crashes, are one list.

``saving.py`` and ``loading.py`` wrap every protocol step in ``Timings.step``; the engine wraps what its threads do
inside a step (hash, write, read, verify ...) in ``Timings.working``. Observers see each step begin and end in the
thread that runs it; an observer that raises (or kills the process) does so in the middle of the protocol. Recorders get
finished spans, of steps and of work, and only look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["LOAD_STEPS", "SAVE_STEPS", "Observer", "Recorder", "Span", "Timings", "Work", "observe", "record"]

SAVE_STEPS = ("check", "describe", "agree", "plan", "stage", "merge", "write", "confirm", "commit", "clean")
LOAD_STEPS = ("check", "open", "describe", "plan", "read", "apply", "report")

Observer = Callable[[str, str], None]
"""Called with ``("save.write", "enter")`` and ``("save.write", "exit")``; inner points of a step bear a longer name,
such as ``save.write.file``, and the event ``"point"``."""

_log = logging.getLogger("bytecheckpoint")
_observers: list[Observer] = []
_recorders: list[Recorder] = []


@dataclass(frozen=True)
class Span:
    """Something that one thread of one rank did: from ``begin`` for ``seconds``, on the clock of
    ``time.perf_counter``. ``operation`` is ``save`` or ``load``, ``url`` the checkpoint; ``is_step`` tells a step of
    the protocol from work inside one."""

    operation: str
    name: str
    begin: float
    seconds: float
    nbytes: int
    rank: int
    url: str
    thread: str
    is_step: bool


Recorder = Callable[[Span], None]
"""Called from the thread that did the work, as soon as it is done. Must be quick and must not raise."""


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer`` at every step of this process from now on. Returns a function that takes it off again."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def record(recorder: Recorder) -> Callable[[], None]:
    """Hand every span of this process to ``recorder`` from now on. Returns a function that takes it off again."""
    _recorders.append(recorder)
    return lambda: _recorders.remove(recorder)


def notify(name: str, event: str) -> None:
    for observer in tuple(_observers):
        observer(name, event)


@dataclass
class Work:
    """What the threads did under one name, all together: ``seconds`` add up over threads, so that they may be more
    than went by on the clock."""

    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0


@dataclass
class Timings:
    """How one save or load went on this rank. Thread-safe.

    ``seconds`` and ``nbytes`` are of each step, in the order in which the steps ran, by the clock; ``work`` is what
    threads did inside the steps. ``pipelined`` says that staging memory was less than the state, so that staging went
    on only as fast as writing gave memory back.
    """

    operation: str
    rank: int = 0
    url: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    pipelined: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a block as step ``name``; observers see it as ``<operation>.<name>``."""
        full = f"{self.operation}.{name}"
        notify(full, "enter")
        begin = time.perf_counter()
        before = self.nbytes.get(name, 0)
        try:
            yield
            notify(full, "exit")
        finally:
            taken = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
            self._record(name, begin, taken, self.nbytes.get(name, 0) - before, is_step=True)
            _log.debug("%s took %.4f s", full, taken)

    @contextmanager
    def working(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time a block as work on ``nbytes`` bytes inside a step. For any thread; costs about two microseconds."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.worked(name, begin, time.perf_counter() - begin, nbytes)

    def worked(self, name: str, begin: float, seconds: float, nbytes: int = 0) -> None:
        """``working`` for who looks at the clock himself: ``begin`` is of ``time.perf_counter``."""
        with self._lock:
            work = self.work.setdefault(name, Work())
            work.seconds += seconds
            work.nbytes += nbytes
            work.count += 1
        self._record(name, begin, seconds, nbytes, is_step=False)

    def point(self, name: str) -> None:
        """A place inside a step where an observer may look in."""
        if _observers:
            notify(f"{self.operation}.{name}", "point")

    def count(self, name: str, nbytes: int) -> None:
        """Add bytes moved by step ``name``."""
        with self._lock:
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def _record(self, name: str, begin: float, seconds: float, nbytes: int, *, is_step: bool) -> None:
        if _recorders:
            thread = threading.current_thread().name
            span = Span(self.operation, name, begin, seconds, nbytes, self.rank, self.url, thread, is_step)
            for recorder in tuple(_recorders):
                recorder(span)

    def __str__(self) -> str:
        steps = ", ".join(_figures(name, took, self.nbytes.get(name, 0)) for name, took in self.seconds.items())
        with self._lock:
            inside = ", ".join(_figures(name, work.seconds, work.nbytes) for name, work in self.work.items())
        return (
            f"{self.operation}: {steps}"
            + (f"; over all threads: {inside}" if inside else "")
            + ("; staging waited for writing (the memory budget is smaller than the state)" if self.pipelined else "")
        )


def _figures(name: str, seconds: float, nbytes: int) -> str:
    rate = f" ({nbytes / 1e6:.1f} MB, {nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s)" if nbytes else ""
    return f"{name} {seconds * 1e3:.1f} ms{rate}"
