"""How much of a version a worker holds in host memory beside its model, by how much there is."""

from __future__ import annotations

from typing import Literal

from .host_memory import free_memory

__all__ = ["DOUBLE", "MODES", "SINGLE", "STREAMED", "Mode", "choose_mode"]

Mode = Literal["double", "single", "streamed"]

DOUBLE: Mode = "double"
"""All of the next version, proved before a weight changes, and all of the one that is served: the way back."""
SINGLE: Mode = "single"
"""All of the next version, proved before a weight changes. Where putting in fails, there is no way back."""
STREAMED: Mode = "streamed"
"""A ring of slots: each chunk is proved before it is put in, while others come. There is no way back."""

MODES: tuple[Mode, ...] = (STREAMED, SINGLE, DOUBLE)
"""From the one that takes least."""

_LEFT_ALONE = 0.2  # of the free memory: others of the host need some too


def choose_mode(nbytes: int, held: int, limit: int | None, sharers: int) -> Mode:
    """For a version of ``nbytes``, where ``held`` bytes of a push are held already. ``limit`` is what may be held; None
    for what is free, of which this worker is one of ``sharers`` that take a part."""
    may = limit if limit is not None else held + int((1 - _LEFT_ALONE) * free_memory() / sharers)
    if may >= 2 * nbytes:
        return DOUBLE
    return SINGLE if may >= nbytes else STREAMED
