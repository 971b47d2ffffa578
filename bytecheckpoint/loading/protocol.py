"""The protocol of a load, from top to bottom.

check      validate the state and the options, and find an adapter for each section
open       rank 0 reads the manifest; every rank validates it and reads the plain values of its sections
describe   adapters list the memory to fill, and give meta tensors memory
plan       requested boxes x stored boxes; all faults of all ranks become one error before any tensor changes
read       ranged reads into place, verified chunk by chunk; one rank reads what several ranks need and forwards it
apply      plain values and newly created optimizer state, once every rank has all of its bytes
report     what was loaded, left unchanged and cast, and the bytes it took
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ..checkpoint.index import Index
from ..control.base import Operation
from ..engine.resources import IOEngine
from ..foreign.opening import CheckpointSource
from ..frameworks.sections import undone_on_failure
from ..runtime.gc_pause import paused
from .options import LoadRequest
from .report import LoadReport
from .run import LoadRun


def load(
    engine: IOEngine, source: CheckpointSource | Index, op: Operation, state: Mapping[str, Any], options: LoadRequest
) -> LoadReport:
    """Load ``state`` on this rank, and close ``op``. Every rank raises the same error."""
    run = LoadRun(engine, source, op, options)
    with closing(op):
        sections = run.step(run.check, state)
        with paused(), undone_on_failure(sections):
            checkpoint = run.step(run.open, sections)
            targets = run.step(run.describe, sections, checkpoint)
            plan = run.step(run.plan, checkpoint, targets)
            if plan.verdict.mismatch is not None:  # outside the step, whose report to others would lose the faults
                raise plan.verdict.mismatch
        counts = run.step(run.read, plan)
        run.step(run.apply, targets)
        return run.step(run.report, checkpoint, sections, plan, counts)
