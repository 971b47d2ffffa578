"""Planners: who writes which bytes where, and what to read for what is wanted. Pure: no torch, no I/O."""

from __future__ import annotations

from .assignment import Assignment
from .contents import CONTENT_BYTES, Comparison, ContentChecks, Contents, Held, as_contents, compare_contents
from .gather_plan import LAYOUTS, GatherPlan, Layout, plan_gather
from .gather_share import PIECE_SIZE, Cuts, GatherShare
from .load_plan import LoadPlan, plan_load
from .local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable, ValueEntry, ValueKey, pack_boxes, unpack_boxes
from .merge import PlannedValues
from .mesh_boxes import mesh_boxes
from .plan_cache import CachedPlan, PlanCache
from .plan_groups import PlanGroup
from .save_plan import PlannedFile, SavePlan, layout, plan_columns, plan_groups, plan_save
from .share_classes import (
    Groups,
    Offer,
    Stripe,
    Want,
    WantClass,
    classify_wants,
    group_ranks,
    is_scattered,
    rings_of,
    scatters_of,
)
from .share_plan import Batch, Piece, Ring, SharedPart, Slab, plan_ring
from .slabs import slabs, span

__all__ = [
    "CONTENT_BYTES",
    "LAYOUTS",
    "OWN_BOXES",
    "PIECE_SIZE",
    "WHOLE",
    "Assignment",
    "Batch",
    "CachedPlan",
    "Comparison",
    "ContentChecks",
    "Contents",
    "Cuts",
    "GatherPlan",
    "GatherShare",
    "Groups",
    "Held",
    "Layout",
    "LoadPlan",
    "LocalPlan",
    "Offer",
    "Piece",
    "PlanCache",
    "PlanGroup",
    "PlanTable",
    "PlannedFile",
    "PlannedValues",
    "Ring",
    "SavePlan",
    "SharedPart",
    "Slab",
    "Stripe",
    "ValueEntry",
    "ValueKey",
    "Want",
    "WantClass",
    "as_contents",
    "classify_wants",
    "compare_contents",
    "group_ranks",
    "is_scattered",
    "layout",
    "mesh_boxes",
    "pack_boxes",
    "plan_columns",
    "plan_gather",
    "plan_groups",
    "plan_load",
    "plan_ring",
    "plan_save",
    "rings_of",
    "scatters_of",
    "slabs",
    "span",
    "unpack_boxes",
]
