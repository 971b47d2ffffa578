"""Plan saves and loads: which rank writes which bytes, and which stored bytes a load reads.

Planners are pure: no torch, no I/O, no collectives. They work on tables of integers (``tensors.tables``), so that a
plan for thousands of ranks and millions of shards takes about a second.

- ``save``: from the ``LocalPlan`` of every rank to a ``SavePlan``, and from that to an ``Assignment`` for each rank.
- ``gather``: which tensors are stored whole although several ranks hold parts of them.
- ``load``: ``plan_load`` intersects requested boxes with stored boxes. Resharding needs nothing else.
- ``share``: which ranks read the same boxes, so that one of them reads and forwards them.

All functions raise ``PlanError`` for inconsistent input.
"""

from __future__ import annotations

from .balance import Assignment
from .contents import (
    CONTRIBUTION_BYTES,
    DIGEST_BYTES,
    ContentChecks,
    ContentComparison,
    ContentDigests,
    HeldContents,
    compare_contents,
    contribution,
    stack_digests,
)
from .extents import byte_span, split_box
from .gather_plan import GatherPlan, Layout, plan_gather
from .gather_share import PIECE_SIZE, FragmentSlices, GatherShare
from .load_plan import LoadPlan, plan_load
from .local_plan import (
    OWN_BOXES,
    WHOLE,
    LocalPlan,
    PackedBoxes,
    PlanTable,
    ValueEntry,
    ValueKey,
    pack_boxes,
    unpack_boxes,
)
from .plan_groups import PlanGroup, mesh_boxes
from .request_classes import (
    BoxRequest,
    ClassSummary,
    RankGroups,
    RequestClass,
    Stripe,
    classify_requests,
    find_rings,
    find_scatters,
    group_ranks,
    is_scattered,
)
from .ring_plan import Batch, Packet, PartBox, Ring, SharedPart, plan_ring
from .save_plan import PlannedFile, SavePlan, consecutive_offsets, plan_columns, plan_groups
from .table_merge import PlannedValues

__all__ = [
    "CONTRIBUTION_BYTES",
    "DIGEST_BYTES",
    "OWN_BOXES",
    "PIECE_SIZE",
    "WHOLE",
    "Assignment",
    "Batch",
    "BoxRequest",
    "ClassSummary",
    "ContentChecks",
    "ContentComparison",
    "ContentDigests",
    "FragmentSlices",
    "GatherPlan",
    "GatherShare",
    "HeldContents",
    "Layout",
    "LoadPlan",
    "LocalPlan",
    "PackedBoxes",
    "Packet",
    "PartBox",
    "PlanGroup",
    "PlanTable",
    "PlannedFile",
    "PlannedValues",
    "RankGroups",
    "RequestClass",
    "Ring",
    "SavePlan",
    "SharedPart",
    "Stripe",
    "ValueEntry",
    "ValueKey",
    "byte_span",
    "classify_requests",
    "compare_contents",
    "consecutive_offsets",
    "contribution",
    "find_rings",
    "find_scatters",
    "group_ranks",
    "is_scattered",
    "mesh_boxes",
    "pack_boxes",
    "plan_columns",
    "plan_gather",
    "plan_groups",
    "plan_load",
    "plan_ring",
    "split_box",
    "stack_digests",
    "unpack_boxes",
]
