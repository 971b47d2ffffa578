"""Cache the plans of recent saves by the structure of what a rank holds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .balance import Assignment
from .contents import ContentChecks, ContentComparison
from .save_plan import SavePlan

# States that one process saves in turn: the models of an RL job, with and without their optimizers.
_MAX_PLANS = 8

FileT = TypeVar("FileT")
MergeT = TypeVar("MergeT")


@dataclass(frozen=True, eq=False)
class CachedPlan(Generic[FileT, MergeT]):
    """This rank's share of an earlier save plan, and everything that follows from it without looking at a tensor.

    Attributes:
        plan_id: The same on all ranks that planned together, and different for every plan.
        assignment: What this rank writes.
        checks: How this rank summarizes its contents.
        nbytes: The size of all tensors of the checkpoint in bytes.
        separated: The full names of plain tensors that turned out to differ between ranks.
        order: The order in which the plan lists this rank's shards.
        files: This rank's files, laid out for writing.
        plan: The complete plan, on rank 0.
        comparison: The comparison of contents, on rank 0.
        merge: The work for tensors that are stored whole.
    """

    plan_id: bytes
    assignment: Assignment
    checks: ContentChecks
    nbytes: int = 0
    separated: list[str] = field(default_factory=list)
    order: list[int] | None = None
    files: list[FileT] = field(default_factory=list)
    plan: SavePlan | None = None
    comparison: ContentComparison | None = None
    merge: MergeT | None = None


class PlanCache(Generic[FileT, MergeT]):
    """The plans used last, by fingerprint. A cached plan may be used only after all ranks have agreed on it."""

    def __init__(self, size: int = _MAX_PLANS) -> None:
        """Create an empty cache.

        Args:
            size: The largest number of plans.
        """
        self._size = size
        self._plans: OrderedDict[bytes, CachedPlan[FileT, MergeT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, fingerprint: bytes) -> CachedPlan[FileT, MergeT] | None:
        """Find a plan.

        Args:
            fingerprint: The structure of what this rank holds.

        Returns:
            The plan that was kept last under this fingerprint, or None.
        """
        found = self._plans.get(fingerprint)
        if found is not None:
            self._plans.move_to_end(fingerprint)
        return found

    def keep(self, fingerprint: bytes, plan: CachedPlan[FileT, MergeT]) -> None:
        """Store a plan, replacing any other with the same fingerprint. A full cache evicts the plan used longest ago.

        Args:
            fingerprint: The structure of what this rank holds.
            plan: The plan.
        """
        self._plans[fingerprint] = plan
        self._plans.move_to_end(fingerprint)
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Remove every plan."""
        self._plans.clear()
