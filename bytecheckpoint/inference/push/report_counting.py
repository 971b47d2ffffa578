"""The bytes of a push, counted from what its senders say."""

from __future__ import annotations

from collections.abc import Sequence

from .planned import Jobs, Outcome, Planned
from .report import WorkerReport
from .writing import KEPT, SENT, UNCHANGED

__all__ = ["count_bytes"]


def count_bytes(
    planned: Planned, made: Jobs, outcomes: Sequence[Outcome], engines: Sequence[str]
) -> tuple[list[WorkerReport], list[int]]:
    """Of each worker, with the name of its engine; and those that each sender handed over."""
    counted = [[0, 0, 0] for _ in planned.workers]
    written = [0] * len(outcomes)
    for sender, (jobs, outcome) in enumerate(zip(made.jobs, outcomes, strict=True)):
        became = iter(outcome.became)
        for job in jobs:
            for target, _ in job.write.chunks:
                kind = next(became)
                counted[target][kind] += job.write.nbytes
                written[sender] += job.write.nbytes if kind == SENT else 0
    reports = [
        WorkerReport(engine, worker.number, worker.host, sum(layout.sizes), of[SENT], of[UNCHANGED], of[KEPT])
        for engine, worker, layout, of in zip(engines, planned.workers, planned.plan.layouts, counted, strict=True)
    ]
    return reports, written
