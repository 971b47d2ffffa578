"""What a rank puts on and takes from the library's own store, by exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bytecheckpoint import trace
from bytecheckpoint.control.line import Line

__all__ = ["LineWatch", "line_watched"]


class LineWatch:
    """Bytes of the messages that this rank sent and got, by exchange (``agree``, ``verdict``, ...) of saves."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.got: dict[str, int] = {}
        self.before_staging = 0

    @property
    def planned_anew(self) -> bool:
        return "tell" in self.sent or "tell" in self.got


@contextmanager
def line_watched() -> Iterator[LineWatch]:
    """Watch this rank. ``before_staging`` counts what was exchanged until the first save began to stage."""
    watch, staged = LineWatch(), False

    def count(of: dict[str, int], key: str, payload: bytes) -> None:
        kind, _, phase = [*key.split("/"), "", ""][:3]
        phase = phase.partition("~")[0]
        if kind == "save" and phase not in ("left", "failure", "waiting"):
            of[phase] = of.get(phase, 0) + len(payload)
            if not staged:
                watch.before_staging += len(payload)

    def observer(name: str, event: str) -> None:
        nonlocal staged
        staged = staged or (name == "save.stage" and event == "enter")

    put, read = Line.put, Line.read

    def watched_put(line: Line, key: str, payload: bytes) -> list[str]:
        count(watch.sent, key, payload)
        return put(line, key, payload)

    def watched_read(line: Line, key: str) -> tuple[bytes, list[str]]:
        payload, keys = read(line, key)
        count(watch.got, key, payload)
        return payload, keys

    stop: Any = trace.observe(observer)
    try:
        with mock.patch.object(Line, "put", watched_put), mock.patch.object(Line, "read", watched_read):
            yield watch
    finally:
        stop()
