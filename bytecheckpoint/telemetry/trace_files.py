"""Spans as files that Perfetto and chrome://tracing open: one a rank, and all ranks' in one.

The form is the JSON array of the Trace Event Format. A rank's file is appended to while it runs and its closing bracket
is left out, which viewers allow, so that what a killed process did can be seen too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import StateError
from .trace import Span, record

__all__ = ["TraceFiles", "merge_traces"]

_log = logging.getLogger(__name__)

_BUFFERED = 500  # events held back while no step ends


class TraceFiles:
    """Writes what this process's saves and loads do from now on into ``directory``, a file for each rank. Thread-safe.

    Ranks are lined up by their hosts' clocks. ``close`` ends it; it is a context manager too. Raises ``StateError``
    where the directory cannot be made. Where it cannot be written to later on, the log says so once, the trace has
    gaps, and saves and loads go on.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"no trace can be written to {self.directory}: {error}") from error
        self._lock = threading.Lock()
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self._begun: set[int] = set()
        self._has_gaps = False
        self._threads: dict[tuple[int, str], int] = {}
        # Spans are on a clock that began anywhere; files of several processes need one that all of them have.
        self._epoch = time.time() - time.perf_counter()
        self._stop = record(self._take)

    def close(self) -> None:
        """Write what is held back, and take no more."""
        self._stop()
        with self._lock:
            for rank in list(self._waiting):
                self._flush(rank)

    def __enter__(self) -> TraceFiles:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take(self, span: Span) -> None:
        with self._lock:
            events = self._waiting.setdefault(span.rank, [])
            events.append(self._event(span))
            if span.is_step or len(events) >= _BUFFERED:
                self._flush(span.rank)

    def _event(self, span: Span) -> dict[str, Any]:
        arguments: dict[str, Any] = {"checkpoint": span.url}
        if span.nbytes:
            arguments |= {"bytes": span.nbytes, "GB/s": round(span.nbytes / 1e9 / max(span.seconds, 1e-9), 3)}
        return {
            "name": f"{span.operation}.{span.name}" if span.is_step else span.name,
            "cat": span.operation,
            "ph": "X",
            "ts": round((self._epoch + span.begin) * 1e6, 1),
            "dur": round(span.seconds * 1e6, 1),
            "pid": span.rank,
            "tid": self._thread(span.rank, span.thread),
            "args": arguments,
        }

    def _thread(self, rank: int, name: str) -> int:
        """Its number; the first time, its name goes into the file too."""
        number = self._threads.get((rank, name))
        if number is None:
            number = self._threads[rank, name] = len(self._threads)
            self._waiting[rank].append(_named("thread_name", rank, number, name))
        return number

    def _flush(self, rank: int) -> None:
        events = self._waiting.pop(rank)
        try:
            self._append(rank, events)
        except OSError as error:
            if not self._has_gaps:
                self._has_gaps = True
                _log.warning("the trace in %s has gaps: %s", self.directory, error)

    def _append(self, rank: int, events: Sequence[dict[str, Any]]) -> None:
        path = self.directory / f"rank-{rank:05d}-{os.getpid()}.json"
        lines = [json.dumps(event) for event in events]
        if rank not in self._begun:
            self._begun.add(rank)
            lines.insert(0, "[" + json.dumps(_named("process_name", rank, 0, f"rank {rank} on {socket.gethostname()}")))
        with path.open("a", encoding="utf-8") as file:
            file.write(",\n".join(lines) + ",\n")


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def merge_traces(paths: Sequence[Path], target: Path) -> int:
    """Write the events of several ranks' files as one file; how many they are.

    Times are counted from the first event. A file's last line may be cut off. Raises ``StateError`` for a file that is
    no trace.
    """
    events = [event for path in paths for event in _events(path)]
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 1)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return len(events)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line.lstrip("[").rstrip(","))
            if not isinstance(event, dict) or "ph" not in event:
                raise ValueError("not an event")
        except ValueError as error:
            if number == len(lines) > 1:  # the process was killed while it wrote
                return
            raise StateError(f"{path}, line {number}: this is no trace of ranks: {error}") from error
        yield event
