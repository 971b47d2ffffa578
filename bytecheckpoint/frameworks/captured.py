"""The adapter for a section that another part of this library has already described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import StateError
from ..tensors.shards import SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context

__all__ = ["CapturedAdapter", "CapturedSection"]


@dataclass(frozen=True, eq=False)
class CapturedSection:
    """What this rank holds of a section, as a tree of tensors and values. It can be saved, and not loaded into."""

    source: SectionSource


class CapturedAdapter(Adapter):
    """Saves a ``CapturedSection`` as the tree that it describes."""

    name: ClassVar[str] = "captured"
    kind: ClassVar[str] = "tree"

    def recognizes(self, obj: object) -> bool:
        return type(obj) is CapturedSection

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source: SectionSource = obj.source
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        raise StateError(f"section {context.section!r} was described for a save and cannot be loaded into")
