"""Framework adapters: which shards an object holds, in global boxes, and where loaded boxes go.

An adapter in another package needs only the names below.
"""

from __future__ import annotations

from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import (
    IrregularShard,
    Path,
    SectionSource,
    SectionTarget,
    Shard,
    StoredSection,
    basic_meta,
    whole_tensor,
)
from .base import Adapter, Context

__all__ = [
    "Adapter",
    "BasicMeta",
    "Box",
    "Context",
    "IrregularShard",
    "Path",
    "SectionSource",
    "SectionTarget",
    "Shard",
    "StoredSection",
    "basic_meta",
    "whole_tensor",
]
