"""Write spans to files that Perfetto and chrome://tracing open: one file per rank, or one for all ranks.

A file is a JSON array of the Trace Event Format. A rank appends to its file while it runs and never writes the closing
bracket, which viewers accept, so that the file of a killed process is readable too.
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

from ..errors import UsageError, without_userinfo
from .trace import Span, record

_log = logging.getLogger(__name__)

# Events buffered before a write, if no step ends earlier.
_MAX_BUFFERED = 500


class TraceFiles:
    """Write the spans of this process's saves and loads to one file per rank. Thread-safe.

    Files are named ``rank-<rank>-<process id>.json``. Ranks are aligned by the clocks of their hosts. If a file cannot
    be written, a warning is logged once, the trace has gaps, and saves and loads continue. Use it as a context manager,
    or call ``close``.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Start recording.

        Args:
            directory: Where the files go. It is created if it does not exist.

        Raises:
            UsageError: The directory cannot be created.
        """
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create the directory {self.directory} for a trace: {error}") from error
        self._lock = threading.Lock()
        self._buffered: dict[int, list[dict[str, Any]]] = {}
        self._begun: set[int] = set()
        self._has_gaps = False
        self._threads: dict[tuple[int, str], int] = {}
        # perf_counter has an arbitrary origin, and files of several processes need a common one.
        self._epoch = time.time() - time.perf_counter()
        self._stop = record(self._add)

    def close(self) -> None:
        """Stop recording, and write what is still buffered."""
        self._stop()
        with self._lock:
            for rank in list(self._buffered):
                self._flush(rank)

    def __enter__(self) -> TraceFiles:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _add(self, span: Span) -> None:
        with self._lock:
            events = self._buffered.setdefault(span.rank, [])
            events.append(self._event(span))
            if span.is_step or len(events) >= _MAX_BUFFERED:
                self._flush(span.rank)

    def _event(self, span: Span) -> dict[str, Any]:
        arguments: dict[str, Any] = {"checkpoint": without_userinfo(span.url)}
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
        """Return the number of a thread, and write its name the first time."""
        number = self._threads.get((rank, name))
        if number is None:
            number = self._threads[rank, name] = len(self._threads)
            self._buffered[rank].append(_named("thread_name", rank, number, name))
        return number

    def _flush(self, rank: int) -> None:
        events = self._buffered.pop(rank)
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
    """Merge the trace files of several ranks into one.

    Times in the merged file count from the first event. The last line of a file may be incomplete.

    Args:
        paths: The files to merge.
        target: The file to write.

    Returns:
        The number of events.

    Raises:
        UsageError: A file is not a trace.
    """
    events = [event for path in paths for event in read_events(path)]
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 1)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return len(events)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank's file, or of a merged one. Raises ``UsageError`` if it is not a trace."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as a trace: {error}") from error
    if text.startswith("{"):
        try:
            yield from json.loads(text)["traceEvents"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a trace: {error!r}") from error
        return
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line.lstrip("[").rstrip(","))
            if not isinstance(event, dict) or "ph" not in event:
                raise ValueError("not an event")
        except ValueError as error:
            if number == len(lines) > 1:  # the process was killed while it wrote
                return
            raise UsageError(f"{path}, line {number} is not an event of a trace: {error}") from error
        yield event
