"""The adapter interface: one adapter a framework, found from the objects or named by ``framework=``.

An adapter answers two questions in global boxes: what shards does this object hold, and where do loaded boxes go.
It never does I/O, never communicates, and never changes the object in ``capture``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..shards import Path, SectionSource, SectionTarget, StoredSection
from .layout import ParamLayout

__all__ = ["Adapter", "Context"]


@dataclass(frozen=True)
class Context:
    """What an adapter may look at beside its own object.

    ``state`` is the whole state of the call, so that an optimizer finds the modules whose parameters it steps.
    ``device`` is where meta-device targets are materialised (None: each tensor's mesh decides, else the CPU).
    ``undo`` takes back, last first, what ``target`` did to the object, where the load then finds a fault.
    """

    section: str
    state: Mapping[str, Any]
    rank: int = 0
    world_size: int = 1
    allow_pickle: bool = False
    device: torch.device | None = None
    notes: list[str] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)


class Adapter(ABC):
    """Stateless; one instance serves every call and every thread."""

    name: ClassVar[str]
    """What ``framework=`` calls it."""

    priority: ClassVar[int] = 0
    """Where several adapters recognise an object, the highest wins (a wrapper's adapter over the plain module's)."""

    @abstractmethod
    def recognizes(self, obj: object) -> bool:
        """Whether this adapter can serve ``obj``. Must not import a framework that ``obj`` cannot come from."""

    @abstractmethod
    def capture(self, obj: Any, context: Context) -> SectionSource:
        """Describe what ``obj`` holds, as views of its own memory. Raises ``StateError`` for what cannot be stored."""

    @abstractmethod
    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        """Make room for ``stored`` in ``obj``: views to fill, and ``apply`` for the rest. ``obj`` changes in ``apply``
        only, but for meta tensors, which are given memory here."""

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        """For models: how each parameter's local memory lies in global boxes, by ``id`` of the parameter object that
        an optimizer steps. Empty for what is no model."""
        return {}

    def per_rank_policies(self, obj: Any) -> dict[Path, str]:
        """What a load into ``obj`` does with values stored for each rank of another world size: a policy (see
        ``per_rank.choose_rank``) by path prefix, the longest prefix winning. Asked before ``target``."""
        return {}
