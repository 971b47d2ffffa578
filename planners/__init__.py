"""Planners: who writes which bytes where, and what to read for what is wanted. Pure: no torch, no I/O."""

from __future__ import annotations

from .load_plan import LoadPlan, plan_load
from .local_plan import LocalPlan, ValueEntry
from .merge import PlannedValue
from .save_plan import Assignment, PlannedFile, SavePlan, layout, plan_columns, plan_save
from .slabs import slabs, span

__all__ = [
    "Assignment",
    "LoadPlan",
    "LocalPlan",
    "PlannedFile",
    "PlannedValue",
    "SavePlan",
    "ValueEntry",
    "layout",
    "plan_columns",
    "plan_load",
    "plan_save",
    "slabs",
    "span",
]
