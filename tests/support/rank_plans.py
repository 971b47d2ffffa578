"""Plan a save from the plans of all ranks, in one process and without messages."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.planners.balance import Assignment
from bytecheckpoint.planners.gather_plan import GatherPlan
from bytecheckpoint.planners.local_plan import LocalPlan, ValueKey, pack_boxes, unpack_boxes
from bytecheckpoint.planners.plan_groups import PlanGroup
from bytecheckpoint.planners.save_plan import SavePlan, plan_groups


def plan_save(plans: Sequence[LocalPlan]) -> SavePlan:
    """Plan a save of what the ranks hold. ``plans`` are by rank."""
    digests: dict[ValueKey, bytes] = {}
    differing: set[ValueKey] = set()
    for plan in plans:
        for value in plan.values:
            key = value.section, value.path
            if digests.setdefault(key, value.digest) != value.digest:
                differing.add(key)
    return plan_groups(_grouped(plans), differing, world_size=len(plans))


def assignment_of(plan: SavePlan | GatherPlan, rank: int) -> Assignment:
    """What ``rank`` unpacks of its assignment."""
    return Assignment.from_bytes(plan.assignment_bytes(rank))


def _grouped(plans: Sequence[LocalPlan]) -> list[PlanGroup]:
    tables = [plan.table() for plan in plans]
    ranks_of: dict[bytes, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks_of.setdefault(table.to_bytes(), []).append(rank)
    groups = []
    for ranks in ranks_of.values():
        table = tables[ranks[0]]
        boxes = unpack_boxes([pack_boxes(plans[rank].own_boxes(), table.tensors) for rank in ranks], table.tensors)
        groups.append(PlanGroup.of(table, ranks, [plans[rank].flat_coordinates() for rank in ranks], *boxes))
    return groups
