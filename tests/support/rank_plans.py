"""Plan a save from the plans of all ranks, in one process and without messages."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from bytecheckpoint.planners.balance import Assignment
from bytecheckpoint.planners.gather_plan import GatherPlan
from bytecheckpoint.planners.local_plan import (
    OWN_BOXES,
    LocalPlan,
    PlanTable,
    ValueKey,
    ValueNames,
    pack_boxes,
    unpack_boxes,
)
from bytecheckpoint.planners.plan_groups import PlanGroup
from bytecheckpoint.planners.save_plan import SavePlan, plan_groups
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.tables import BoxTable, TensorTable


def rank_plan(
    tensors: TensorTable,
    shards: BoxTable,
    coordinates: Sequence[tuple[int, ...]] = (),
    *,
    own: Sequence[bool] = (),
    held: Sequence[int] = (),
    layouts: Sequence[MeshLayout] = (),
    pinned: Sequence[bool] = (),
    values: Sequence[tuple[str, bytes, bool]] = (),
    aliases: Sequence[tuple[str, str]] = (),
    sections: Sequence[tuple[str, str]] = (),
) -> LocalPlan:
    """The plan of a rank that lists its boxes and compares no contents, unless the arguments say otherwise.

    ``values`` are sections, paths, and whether they are per rank.
    """
    none = np.zeros(len(tensors), np.bool_)
    table = PlanTable(
        tensors,
        np.array(own, np.bool_) if own else none,
        np.array(pinned, np.bool_) if pinned else none,
        none,
        none,
        np.array(held or [OWN_BOXES] * len(tensors), np.int64),
        list(layouts),
        ValueNames(
            [section for section, _, _ in values],
            [path for _, path, _ in values],
            np.array([per_rank for _, _, per_rank in values], np.bool_),
        ),
        list(aliases),
        list(sections),
    )
    return LocalPlan(table, shards, list(coordinates))


def plan_save(plans: Sequence[LocalPlan], differing: AbstractSet[ValueKey] = frozenset()) -> SavePlan:
    """Plan a save of what the ranks hold, by rank. Values in ``differing`` are not equal on all ranks."""
    return plan_groups(_grouped(plans), set(differing), world_size=len(plans))


def assignment_of(plan: SavePlan | GatherPlan, rank: int) -> Assignment:
    """What ``rank`` unpacks of its assignment."""
    return Assignment.from_bytes(plan.assignment_bytes(rank))


def _grouped(plans: Sequence[LocalPlan]) -> list[PlanGroup]:
    ranks_of: dict[bytes, list[int]] = {}
    for rank, plan in enumerate(plans):
        ranks_of.setdefault(plan.packed_table, []).append(rank)
    groups = []
    for ranks in ranks_of.values():
        table = plans[ranks[0]].table
        boxes = unpack_boxes([pack_boxes(plans[rank].own_boxes(), table.tensors) for rank in ranks], table.tensors)
        groups.append(PlanGroup.of(table, ranks, [plans[rank].flat_coordinates() for rank in ranks], *boxes))
    return groups
