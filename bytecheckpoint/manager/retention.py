"""Which checkpoints may go. Pure: what to keep is a function of what is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import StateError

__all__ = ["Kept", "Retention"]


@dataclass(frozen=True)
class Kept:
    """A committed checkpoint. ``metric`` is None where it was saved without one; NaN counts as none."""

    name: str
    step: int
    metric: float | None = None


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept if any rule wants it: the ``last`` ones committed, every one whose step is a multiple of
    ``every``, the ``best`` ones by their metric. The one committed last is always kept. No rule keeps everything."""

    last: int | None = None
    every: int | None = None
    best: int | None = None
    lower_is_better: bool = True

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every), ("keep_best", self.best)):
            if value is not None and (type(value) is not int or value < 1):
                raise StateError(f"{name} is a whole number from 1 on, not {value!r}")

    def expendable(self, committed: Sequence[Kept]) -> list[Kept]:
        """Those that no rule wants, of all that are ``committed``, in the order of their commits."""
        if self.last is None and self.every is None and self.best is None:
            return []
        wanted = {kept.name for kept in committed[-(self.last or 1) :]}
        if self.every is not None:
            wanted |= {kept.name for kept in committed if kept.step % self.every == 0}
        if self.best is not None:
            wanted |= {kept.name for kept in self._ranked(committed)[: self.best]}
        return [kept for kept in committed if kept.name not in wanted]

    def _ranked(self, committed: Sequence[Kept]) -> list[Kept]:
        sign = 1.0 if self.lower_is_better else -1.0
        measured = [
            (kept.metric, kept) for kept in committed if kept.metric is not None and not math.isnan(kept.metric)
        ]
        # Of equals the later one: it has seen more data.
        return [kept for metric, kept in sorted(measured, key=lambda one: (sign * one[0], -one[1].step))]
