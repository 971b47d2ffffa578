"""Plans that may be good for the next save too, by the structure of what a rank holds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .assignment import Assignment
from .contents import Comparison, ContentChecks
from .save_plan import SavePlan

__all__ = ["CachedPlan", "PlanCache"]

_PLANS = 8  # states that one process saves in turn: models of an RL job, with and without their optimizers

FileT = TypeVar("FileT")
MergeT = TypeVar("MergeT")


@dataclass(frozen=True, eq=False)
class CachedPlan(Generic[FileT, MergeT]):
    """This rank's share of a save that was planned before, and whatever follows from it without looking at a tensor.

    ``plan_id`` is the same on all ranks that planned together, and on no other plan. ``separated`` are the full names
    of plain tensors that turned out to be each rank's own; ``order`` is that in which the plan lists the shards.
    ``files`` are laid out as they will be written; ``merge`` is what it does for tensors that are stored whole.
    ``nbytes`` are of all tensors of the checkpoint. ``plan`` and ``comparison`` are rank 0's.
    """

    plan_id: bytes
    assignment: Assignment
    checks: ContentChecks
    nbytes: int = 0
    separated: list[str] = field(default_factory=list)
    order: list[int] | None = None
    files: list[FileT] = field(default_factory=list)
    plan: SavePlan | None = None
    comparison: Comparison | None = None
    merge: MergeT | None = None


class PlanCache(Generic[FileT, MergeT]):
    """The plans used last, by fingerprint. Never proof of anything: only together may ranks use what they find."""

    def __init__(self, size: int = _PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[bytes, CachedPlan[FileT, MergeT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, fingerprint: bytes) -> CachedPlan[FileT, MergeT] | None:
        """The plan kept last under this fingerprint."""
        found = self._plans.get(fingerprint)
        if found is not None:
            self._plans.move_to_end(fingerprint)
        return found

    def keep(self, fingerprint: bytes, plan: CachedPlan[FileT, MergeT]) -> None:
        """Keep a plan in place of any other of this fingerprint; the one used longest ago makes room."""
        self._plans[fingerprint] = plan
        self._plans.move_to_end(fingerprint)
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget every plan."""
        self._plans.clear()
