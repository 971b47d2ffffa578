"""Save on a schedule, apply retention rules, resume from the newest valid checkpoint, and handle preemption."""

from __future__ import annotations

from .callbacks import Callbacks
from .manager import CheckpointManager
from .options import Cadence, ExceptionSave, JobOptions, Preemption, Retention

__all__ = [
    "Cadence",
    "Callbacks",
    "CheckpointManager",
    "ExceptionSave",
    "JobOptions",
    "Preemption",
    "Retention",
]
