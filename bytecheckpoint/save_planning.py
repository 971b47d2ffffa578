"""What the ranks settle before a byte is staged: that they make the same call, and who writes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from .control.agreement import describe_disagreement
from .control.base import Operation
from .engine.commit import new_attempt
from .errors import DisagreementError, PlanError
from .local_state import LocalState
from .planners import Assignment, LocalPlan, SavePlan, plan_save

__all__ = ["Settled", "Told", "agree", "settle"]


class Told(NamedTuple):
    """What a rank brings to rank 0: the arguments of its call, digests of tensors that may differ, its plan."""

    facts: dict[str, str]
    digests: dict[str, bytes]
    plan: bytes


@dataclass(frozen=True)
class Settled:
    """This rank's share of a save, under the name of its attempt; ``plan`` is all of it, on rank 0 alone."""

    attempt: str
    assignment: Assignment
    plan: SavePlan | None


def agree(op: Operation, local: LocalState, facts: dict[str, str]) -> list[Told] | None:
    """Bring everything rank 0 needs to compare and to plan, in one exchange; on rank 0, compare.

    A ``DisagreementError`` is raised by rank 0, and by the others when they wait for its plan.
    """
    told = op.gather("agree", msgpack.packb([facts, local.digests, local.plan.to_bytes()]))
    if told is None:
        return None
    everyone = [Told(*msgpack.unpackb(part)) for part in told]
    disagreement = describe_disagreement("save", [one.facts for one in everyone])
    if disagreement:
        raise DisagreementError(disagreement)
    return everyone


def settle(op: Operation, local: LocalState, everyone: list[Told] | None) -> Settled:
    """Rank 0 plans, and hands each rank its share. Where plain tensors of trees turn out to be no replicas of each
    other, each rank first makes them its own and says so."""
    differing = None if everyone is None else _differing([one.digests for one in everyone])
    plans: Sequence[bytes] | None = None if everyone is None else [one.plan for one in everyone]
    for _ in range(2):
        plan, shares = _plan(plans, differing)
        attempt, names, share = msgpack.unpackb(op.scatter("plan", shares))
        if attempt:
            return Settled(attempt, Assignment.from_bytes(share, local.plan), plan)
        local.separate(names)
        plans, differing = op.gather("separated", local.plan.to_bytes()), []
    raise PlanError("rank 0 asked twice to separate tensors that differ between ranks")


def _plan(plans: Sequence[bytes] | None, differing: list[str] | None) -> tuple[SavePlan | None, list[bytes] | None]:
    """On rank 0, the plan, and what each rank is told: an attempt and its share, or names to separate first."""
    if plans is None:
        return None, None
    if differing:
        return None, [msgpack.packb(["", differing, b""])] * len(plans)
    plan = plan_save([LocalPlan.from_bytes(each) for each in plans])
    attempt = new_attempt()
    return plan, [msgpack.packb([attempt, [], plan.assignment(r).to_bytes()]) for r in range(len(plans))]


def _differing(digests: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Names whose digest is not the same on all ranks that have them."""
    seen: dict[str, bytes] = {}
    differing = set()
    for of_rank in digests:
        for name, digest in of_rank.items():
            if seen.setdefault(name, digest) != digest:
                differing.add(name)
    return sorted(differing)
