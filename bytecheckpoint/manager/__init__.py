"""Save on a schedule, keep the right checkpoints, resume from the newest valid one, and handle preemption."""

from __future__ import annotations

from .manager import CheckpointManager
from .options import Cadence, Preemption, Retention

__all__ = ["Cadence", "CheckpointManager", "Preemption", "Retention"]
