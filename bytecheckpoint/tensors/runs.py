"""Items that are read, written or sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def runs_of(items: Iterable[T], nbytes_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Cut ``items`` into runs of at most ``limit`` bytes, and at least one item."""
    run: list[T] = []
    used = 0
    for item in items:
        nbytes = nbytes_of(item)
        if run and used + nbytes > limit:
            yield run
            run, used = [], 0
        run.append(item)
        used += nbytes
    if run:
        yield run
