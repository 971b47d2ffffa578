"""Save on a schedule, apply retention rules, resume from the newest valid checkpoint, and handle preemption."""

from __future__ import annotations

from .manager import CheckpointManager
from .options import Cadence, Preemption, Retention

__all__ = ["Cadence", "CheckpointManager", "Preemption", "Retention"]
