"""Named steps, their timings, and the functions that observe or record them.

The save and load protocols wrap every step in ``Timings.step``; the engine wraps the work of its threads inside a step
(hash, write, read, verify, ...) in ``Timings.measure``. Observers are called in the thread that runs the step. An
observer that raises, or that kills the process, does so in the middle of the protocol; tests use this to inject
crashes. Recorders receive finished spans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..errors import without_userinfo

SAVE_STEPS = ("check", "describe", "agree", "plan", "stage", "merge", "write", "confirm", "commit", "clean")
LOAD_STEPS = ("check", "open", "describe", "plan", "read", "apply", "report")

Observer = Callable[[str, str], None]
"""Called with a name and an event: ``("save.write", "enter")`` and ``("save.write", "exit")`` for a step, and
``("save.write.file", "point")`` for a point inside a step."""

_log = logging.getLogger("bytecheckpoint")
_observers: list[Observer] = []
_recorders: list[Recorder] = []


@dataclass(frozen=True)
class Span:
    """A step, or work inside a step, that one thread has finished.

    Attributes:
        operation: ``save``, ``load`` or ``push``.
        name: The name of the step or of the work.
        begin: When it began, in seconds on the clock of ``time.perf_counter``.
        seconds: How long it took.
        nbytes: How many bytes it moved; 0 if that does not apply.
        rank: The rank that ran it.
        url: The checkpoint.
        thread: The name of the thread that ran it.
        is_step: True for a step of the protocol, false for work inside a step.
    """

    operation: str
    name: str
    begin: float
    seconds: float
    nbytes: int
    rank: int
    url: str = field(repr=False)  # it may contain a password
    thread: str
    is_step: bool


Recorder = Callable[[Span], None]
"""Called in the thread that did the work, as soon as it is finished. It must be quick and must not raise."""


def observe(observer: Observer) -> Callable[[], None]:
    """Call a function at the begin and the end of every step in this process.

    Args:
        observer: See ``Observer``. It is called in the thread that runs the step, and may raise.

    Returns:
        A function that removes the observer.
    """
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def record(recorder: Recorder) -> Callable[[], None]:
    """Pass every finished span in this process to a function.

    Args:
        recorder: See ``Recorder``.

    Returns:
        A function that removes the recorder.
    """
    _recorders.append(recorder)
    return lambda: _recorders.remove(recorder)


def notify(name: str, event: str) -> None:
    """Call every observer."""
    for observer in tuple(_observers):
        observer(name, event)


@dataclass
class Work:
    """The work of all threads under one name.

    Attributes:
        seconds: The sum over all threads, which may exceed the elapsed time.
        nbytes: How many bytes the threads moved.
        count: How many times work of this name was done.
    """

    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0


@dataclass
class Timings:
    """The timings of one save or load on this rank.

    ``str`` formats them on one line. Several threads may record work at the same time; a step runs on one thread at a
    time. Read the attributes when the operation has ended.

    Attributes:
        operation: ``save`` or ``load``.
        rank: This rank.
        url: The checkpoint.
        seconds: Elapsed seconds of each step, in the order in which the steps ran.
        nbytes: Bytes that each step moved.
        work: Work of threads inside the steps, by name.
        pipelined: True if the state was staged while it was written, because there was less staging memory than state:
            the memory budget is smaller, or the memory was not faulted in yet (in the first save of a process).
        begun: When the operation began, in seconds on the clock of ``time.perf_counter``.
    """

    operation: str
    rank: int = 0
    url: str = field(default="", repr=False)  # it may contain a password
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    pipelined: bool = False
    begun: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a block as a step of the protocol, and notify observers at its begin and end.

        Args:
            name: The step's name. Observers receive ``<operation>.<name>``.

        Yields:
            Nothing; the block is the step.
        """
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
    def measure(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time a block as work inside a step. Thread-safe; costs about two microseconds.

        Args:
            name: The name of the work.
            nbytes: The bytes that the block moves.

        Yields:
            Nothing; the block is the work.
        """
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record_work(name, begin, time.perf_counter() - begin, nbytes)

    def record_work(self, name: str, begin: float, seconds: float, nbytes: int = 0) -> None:
        """Add work that the caller has timed. Thread-safe.

        Args:
            name: The name of the work.
            begin: When it began, in seconds on the clock of ``time.perf_counter``.
            seconds: How long it took.
            nbytes: The bytes that it moved.
        """
        with self._lock:
            work = self.work.setdefault(name, Work())
            work.seconds += seconds
            work.nbytes += nbytes
            work.count += 1
        self._record(name, begin, seconds, nbytes, is_step=False)

    def point(self, name: str) -> None:
        """Notify observers of the point ``name`` inside a step, as ``<operation>.<name>``."""
        if _observers:
            notify(f"{self.operation}.{name}", "point")

    def count(self, name: str, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes that step ``name`` has moved. Thread-safe."""
        with self._lock:
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for logs and dashboards.

        Returns:
            ``operation``, ``rank``, ``seconds`` and ``bytes`` by step, ``work`` by name (each with ``seconds``,
            ``bytes`` and ``count``) and ``pipelined``.
        """
        with self._lock:
            work = {
                name: {"seconds": one.seconds, "bytes": one.nbytes, "count": one.count}
                for name, one in self.work.items()
            }
            return {
                "operation": self.operation,
                "rank": self.rank,
                "seconds": dict(self.seconds),
                "bytes": dict(self.nbytes),
                "work": work,
                "pipelined": self.pipelined,
            }

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
            + ("; staged while writing (less staging memory than state)" if self.pipelined else "")
        )


def _figures(name: str, seconds: float, nbytes: int) -> str:
    rate = f" ({nbytes / 1e6:.1f} MB, {nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s)" if nbytes else ""
    return f"{name} {seconds * 1e3:.1f} ms{rate}"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table, without passwords of URLs."""
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><strong>{_text(title)}</strong>{table if body else ''}</div>"


def timings_table(title: str, timings: Timings) -> str:
    """Return a table of the steps that have ended."""
    seconds = dict(timings.seconds)  # another thread may add one
    rows = [(step, f"{took * 1e3:,.1f}", f"{timings.nbytes.get(step, 0) / 1e6:,.1f}") for step, took in seconds.items()]
    return html_table(title, ("step", "ms", "MB"), rows)


def _cell(value: object) -> str:
    return f"<td>{_text(f'{value:,}' if isinstance(value, int) else value)}</td>"


def _text(value: object) -> str:
    return escape(without_userinfo(str(value)))
