"""What a push did: seconds by stage, bytes by worker and by sender."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .staging import DOUBLE, Mode

__all__ = ["STAGES", "PushReport", "WorkerReport"]

STAGES = ("describe", "plan", "prepare", "write", "verify", "apply", "stream")
"""Of a push, in their order. ``describe``: what is there and what is wanted; ``plan``: who writes what; ``prepare``:
memory on the workers; ``apply``: pause, put in, resume; ``stream``: the last three at once."""


@dataclass(frozen=True)
class WorkerReport:
    """Bytes: ``wanted`` by this worker; of them ``sent`` now, ``unchanged`` since the version it served and copied
    there by itself, and ``kept`` from what its memory held."""

    engine: str
    worker: int
    host: str
    wanted: int
    sent: int
    unchanged: int
    kept: int


@dataclass(frozen=True)
class PushReport:
    """The same on every rank. ``written`` are the bytes that each sender handed over, by rank."""

    version: int | str
    seconds: dict[str, float]
    workers: list[WorkerReport]
    written: list[int]
    engine_bytes: int = field(default=0)
    """Of all tensors of the senders: what a broadcast would bring to every worker."""
    mode: Mode = DOUBLE
    """How much workers held of it: see ``Pusher``'s ``memory_bytes``."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> PushReport:
        workers = [WorkerReport(**worker) for worker in values["workers"]]
        return cls(**{**values, "workers": workers})

    def __str__(self) -> str:
        lines = [f"version {self.version!r} in {self.total_s:.3f} s, {self.mode}"]
        lines += [f"  {stage:<9}{self.seconds[stage]:9.3f} s" for stage in STAGES if stage in self.seconds]
        lines.append(f"  {'worker':<9}{'wanted':>16}{'sent':>16}{'unchanged':>16}{'kept':>16}")
        for one in self.workers:
            lines.append(f"  {one.worker:<9}{one.wanted:>16,}{one.sent:>16,}{one.unchanged:>16,}{one.kept:>16,}")
        return "\n".join(lines)
