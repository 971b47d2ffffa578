"""What rules say about stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..tensors.metadata import BasicMeta
from .kinds import Rule
from .numbering import place_text
from .regions import Region, Source

__all__ = ["GlobalTensor", "Resolution"]


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor that stored tensors make up.

    Attributes:
        meta: Its dtype and shape.
        regions: Its boxes, and where they are stored. Together they cover the tensor. If several ranks hold copies,
            each has its region.
        rule: The rule of the stored tensors, or of the members of their flat buffers.
        copies: What regions of the same elements are: ``same`` (any may be used), ``compare`` (the reader must compare
            them), ``mean`` (the value is their mean).
    """

    meta: BasicMeta
    regions: tuple[Region, ...]
    rule: Rule
    copies: Literal["same", "compare", "mean"] = "same"


@dataclass(frozen=True)
class Resolution:
    """Which global tensors a list of stored tensors holds. The tensors are in the order in which they are stored.

    Attributes:
        sources: The stored tensors. ``Region.source`` is a position in this list.
        tensors: The global tensors by name.
    """

    sources: tuple[Source, ...]
    tensors: dict[str, GlobalTensor]

    def by_source(self) -> list[list[tuple[str, Region]]]:
        """Return what each stored tensor holds.

        Returns:
            For each source, global names and regions in the order of the source's elements. It is empty for tensors
            that are ignored, or are padding.
        """
        found: list[list[tuple[str, Region]]] = [[] for _ in self.sources]
        for name, tensor in self.tensors.items():
            for region in tensor.regions:
                found[region.source].append((name, region))
        for held in found:
            held.sort(key=lambda one: one[1].position)
        return found

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield a table for people, one row per region.

        Yields:
            The global name, its dtype and shape, the kind and pattern of its rule, the box, and where it is stored.
        """
        for name, tensor in self.tensors.items():
            rule = f"{tensor.rule.kind} {tensor.rule.match}"
            for region in tensor.regions:
                source = self.sources[region.source]
                view = (
                    region.within
                    if region.shape == source.shape
                    else f"[{region.position}:] as {list(region.box.lengths)}"
                )
                where = f" on {place_text(source.place)}" if source.place else ""
                yield name, str(tensor.meta), rule, str(region.box), f"{source.name}{view}{where}"


def in_stored_order(tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    def key(name: str) -> tuple[int, int]:
        regions: Sequence[Region] = tensors[name].regions
        return min(((region.source, region.position) for region in regions), default=(-1, 0))

    return {name: tensors[name] for name in sorted(tensors, key=key)}
