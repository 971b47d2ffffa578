"""Cache the plans of recent saves by the structure of what a rank holds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..engine.files import FileLayout
from ..engine.merging.merge import MergeWork
from ..planners import Assignment, ContentChecks, ContentComparison, SavePlan

# States that one process saves in turn: the models of an RL job, with and without their optimizers.
_MAX_PLANS = 8


@dataclass(frozen=True, eq=False)
class PlannedShare:
    """This rank's share of an earlier save plan, and everything that follows from it without looking at a tensor.

    Attributes:
        plan_id: The same on all ranks that planned together, and different for every plan.
        assignment: What this rank writes.
        checks: How this rank summarizes its contents.
        nbytes: The size of all tensors of the checkpoint in bytes.
        separated: The full names of plain tensors that turned out to differ between ranks.
        order: The order in which the plan lists this rank's shards.
        files: This rank's files, laid out for writing.
        merge: The work for tensors that are stored whole.
        plan: The complete plan, on rank 0.
        comparison: The comparison of contents, on rank 0.
    """

    plan_id: bytes
    assignment: Assignment
    checks: ContentChecks
    nbytes: int
    separated: list[str]
    order: list[int] | None
    files: list[FileLayout]
    merge: MergeWork | None
    plan: SavePlan | None = None
    comparison: ContentComparison | None = None


class PlanCache(OrderedDict[bytes, PlannedShare]):
    """The plans used last, by fingerprint. A cached plan may be used only after all ranks have agreed on it."""

    def find(self, fingerprint: bytes) -> PlannedShare | None:
        """Return the plan that was kept last under this fingerprint."""
        found = self.get(fingerprint)
        if found is not None:
            self.move_to_end(fingerprint)
        return found

    def keep(self, fingerprint: bytes, plan: PlannedShare) -> None:
        """Keep a plan in place of any other with the same fingerprint, or of the one used longest ago."""
        self[fingerprint] = plan
        self.move_to_end(fingerprint)
        while len(self) > _MAX_PLANS:
            self.popitem(last=False)
