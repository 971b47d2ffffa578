"""What a worker serves, as something to send from: its own parts of the tensors, where they lie in its arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from ...dtypes import DType
from ...engine.tensor_bytes import byte_view, copy_elements
from ...errors import CorruptionError, PlanError
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import torch_dtype
from .layout import Layout
from .messages import Table
from .sources import Source

__all__ = ["ArenaSource", "HeldType", "held_type"]

HeldType = tuple[Box, DType]


def held_type(held: Sequence[HeldType], box: Box) -> DType:
    """In which type ``box`` is given by who has ``held`` of its tensor. Raises ``PlanError`` where it is not there."""
    for outer, dtype in held:
        if outer.contains(box):
            return dtype
    raise PlanError(f"{box} is not held; the plan is of another version")


class ArenaSource(Source):
    """One worker's share of a version. ``table`` is that of who pushed it, so ``fetch`` may give other types than it
    says: those in which the worker was sent its parts. Where it was sent one in several, the table's own comes first.

    Of each chunk that is fetched, it is proved first that the memory is what the digests say.
    """

    def __init__(
        self, table: Table, layout: Layout, memory: torch.Tensor, digests: Sequence[int], version: int | str | None
    ) -> None:
        self.table, self.version = table, version
        self._layout, self._memory, self._digests = layout, memory, digests
        self._proved: set[int] = set()
        stored = {name: meta.dtype for name, meta in table.rows}
        self._parts: dict[str, list[int]] = {}
        for number, part in sorted(enumerate(layout.parts), key=lambda one: one[1].dtype != stored.get(one[1].name)):
            self._parts.setdefault(part.name, []).append(number)
        self._chunks: dict[int, list[tuple[int, Box]]] = {}
        for number, (of, box) in enumerate(layout.chunks):
            self._chunks.setdefault(of, []).append((number, box))
        self.held = [(name, layout.parts[part].box) for name, parts in self._parts.items() for part in parts]

    @property
    def types(self) -> list[DType]:
        """Of what is ``held``, in its order."""
        return [self._layout.parts[part].dtype for parts in self._parts.values() for part in parts]

    def fetch(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Raises ``CorruptionError`` where the memory has changed since it was proved when it was pushed."""
        return [self._view(name, box) for name, box in wanted]

    def _view(self, name: str, box: Box) -> torch.Tensor:
        for number in self._parts.get(name, ()):
            part = self._layout.parts[number]
            if part.box.contains(box):
                return self._assembled(number, box, torch_dtype(BasicMeta(part.dtype, part.shape)))
        raise PlanError(f"{name} {box} is not held here; the plan is of another version")

    def _assembled(self, part: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A view of one chunk, or a copy of what lies in several."""
        out: torch.Tensor | None = None
        for number, held in self._chunks.get(part, ()):
            common = box.intersect(held)
            if common is None:
                continue
            source = self._chunk(number, held, dtype)[common.relative_to(held).slices()]
            if common == box:
                return source
            out = torch.empty(box.lengths, dtype=dtype) if out is None else out
            copy_elements(out[common.relative_to(box).slices()], source)
        return torch.empty(box.lengths, dtype=dtype) if out is None else out

    def _chunk(self, number: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        begin = self._layout.offsets[number]
        data = self._memory[begin : begin + self._layout.sizes[number]]
        if number not in self._proved:
            if xxhash.xxh3_64_intdigest(byte_view(data)) != self._digests[number]:
                raise CorruptionError(
                    f"what it has of version {self.version!r} is damaged in memory: {self._layout.name_of(number)}; "
                    "nobody was given that, push to it anew"
                )
            self._proved.add(number)
        return data.view(dtype).view(box.lengths)
