"""Distinguish the checkpoints of this library from those that a trainer itself wrote."""

from __future__ import annotations

from ..api import open as open_checkpoint
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..errors import CheckpointNotFoundError, NotACheckpointError


def open_own(location: Location) -> Checkpoint | None:
    """Open a checkpoint of this library; None if there is something else."""
    try:
        found = open_checkpoint(location)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return found if found.index.is_own else None
