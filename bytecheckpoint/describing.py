"""From the caller's state to what this rank brings into a save: the first thing every save (and warm-up) does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .control.base import Operation
from .local_state import LocalState
from .save_options import SaveOptions
from .sections import resolve_sections

__all__ = ["describe_state"]


def describe_state(op: Operation, state: Mapping[str, Any], options: SaveOptions) -> LocalState:
    """What this rank holds of ``state``, as its adapters say; no tensor is copied. Raises ``StateError``."""
    rank, world_size, allow_pickle = op.rank, op.world_size, options.allow_pickle
    sections = resolve_sections(
        state, framework=options.framework, rank=rank, world_size=world_size, allow_pickle=allow_pickle
    )
    sources = {section.name: section.capture() for section in sections}
    return LocalState(
        sections, sources, rank=rank, world_size=world_size, allow_pickle=allow_pickle, layout=options.layout
    )
