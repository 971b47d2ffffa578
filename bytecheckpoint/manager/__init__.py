"""When to save, what to keep, where to resume, and how to leave: the checkpoints of one job below one root."""

from __future__ import annotations

from .manager import CheckpointManager

__all__ = ["CheckpointManager"]
