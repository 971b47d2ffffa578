"""Joins that are held up while the bytes are on their way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from toy_engine import ToyEngine

_LONG_S = 30.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Return when it is so."""
    end = time.monotonic() + _LONG_S
    while not condition():
        assert time.monotonic() < end, f"still not so: {what}"
        time.sleep(0.01)


def arenas(engine: ToyEngine) -> list[int]:
    """How many each worker has mapped, its own and others'."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.look()["pids"]]
    return [text.count("/memfd:bcp-") for text in maps]


@contextmanager
def giving(holder: ToyEngine) -> Iterator[Callable[..., None]]:
    """In the block, what the workers of ``holder`` give waits; what is yielded returns when all of them have begun."""
    workers = range(len(holder.look()["pids"]))
    threads = holder.look()["threads"]
    for worker in workers:
        holder.fault(worker, "stall")

    def begun(join: Future[Any] | None = None) -> None:
        def is_begun() -> bool:
            if join is not None and join.done():
                raise AssertionError(f"it is over before it began: {join.result()}")
            # One that gives, and one that writes.
            return all(now >= then + 2 for now, then in zip(holder.look()["threads"], threads, strict=True))

        until(is_begun, "begun")

    try:
        yield begun
    finally:
        for worker in workers:
            with suppress(HTTPError):  # it has been killed
                holder.fault(worker, "go on")
