"""Helpers for joins that are held up in the middle, and for what an engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from toy_engine import ToyEngine

from bytecheckpoint.testing import time_limit

_LONG_S = time_limit(30)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + _LONG_S
    while not condition():
        assert time.monotonic() < end, f"still not so: {what}"
        time.sleep(0.01)


def held_by(engine: ToyEngine) -> dict[str, list[int]]:
    """Return what each worker holds, except threads and descriptors that end a moment after a push."""
    looks = [engine.look() for _ in range(5)]
    return {
        name: [min(counts) for counts in zip(*(look[name] for look in looks), strict=True)]
        for name in ("descriptors", "threads", "arenas")
        if name in looks[0]
    }


def wait_until_it_holds_at_most(engine: ToyEngine, held: dict[str, list[int]]) -> None:
    """Wait until no worker holds more; a thread or a socket ends a moment after the push that used it."""

    def is_so() -> bool:
        seen = engine.look()
        return all(now <= then for name in held for now, then in zip(seen[name], held[name], strict=True))

    until(is_so, f"at most {held}")


def arenas(engine: ToyEngine) -> list[int]:
    """Count the arenas that each worker has mapped, its own and those of others."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.look()["pids"]]
    return [text.count("/memfd:bcp-") for text in maps]


@contextmanager
def giving(holder: ToyEngine, joins: int = 1) -> Iterator[Callable[..., None]]:
    """Hold up what the workers of ``holder`` send over TCP; the yielded function returns when they would send to this
    number of joins."""
    workers = range(len(holder.look()["pids"]))
    for worker in workers:
        holder.fault(worker, "stall")

    def begun(join: Future[Any] | None = None) -> None:
        def is_begun() -> bool:
            if join is not None and join.done():
                raise AssertionError(f"it is over before it began: {join.result()}")
            return bool(sum(holder.look()["waiting"]) >= joins)

        until(is_begun, "begun")

    try:
        yield begun
    finally:
        for worker in workers:
            with suppress(HTTPError):  # the worker has been killed
                holder.fault(worker, "go on")
