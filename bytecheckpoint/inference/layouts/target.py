"""What one rank of an inference engine is made of: which part of which stored tensor goes to which part of which
parameter. Learned once from the engine's own loader, then plain data: compared, packed, sent, cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import xxhash
from torch import nn

from ..errors import StateError
from ..geometry import Box
from ..shards import basic_meta
from .layout_columns import compress
from .layout_packing import LAYOUT_VERSION, LayoutTensor, Placement, pack_layout, unpack_layout
from .parts import Part, each_once
from .recording import Copy, Recorder, storage_identity
from .strided import StridedView, box_of

__all__ = ["LAYOUT_VERSION", "Figures", "LayoutTensor", "Placement", "TargetLayout"]


@dataclass(frozen=True)
class Figures:
    """Bytes: of all stored tensors, of the rank's parameters, of what has to reach the rank, and of that which is
    exactly what parameters hold (the *fast path*: no whole tensor is sent for a part of it, or to compute with)."""

    stored: int
    parameters: int
    wanted: int
    fast: int

    @property
    def share(self) -> float:
        """Of the wanted bytes, those on the fast path."""
        return self.fast / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class TargetLayout:
    """``seen``: numbers of stored tensors whose values the loader computes with. They are wanted whole, and what it
    makes of them only it knows: no placement says so."""

    stored: tuple[LayoutTensor, ...]
    parameters: tuple[LayoutTensor, ...]
    placements: tuple[Placement, ...]
    seen: tuple[int, ...] = ()

    @classmethod
    def from_recording(
        cls, recorder: Recorder, stored: Iterable[tuple[str, Sequence[int], torch.dtype]], model: nn.Module
    ) -> TargetLayout:
        """What ``recorder`` noted while ``model``'s loader took the tensors ``stored`` from it. Raises ``StateError``
        for a copy into anything but elements of the model's own contiguous parameters and buffers."""
        sources = tuple(_described(name, dtype, shape) for name, shape, dtype in stored)
        row = {tensor.name: number for number, tensor in enumerate(sources)}
        places = _Places(model, recorder.copies)
        placements = tuple(
            Placement(row[copy.name], copy.view, *places.of(copy)) for copy in recorder.copies if copy.view.numel
        )
        seen = tuple(sorted({row[name] for name, _ in recorder.seen}))
        return cls(sources, places.tensors, placements, seen)

    def parts(self) -> list[Part]:
        """What has to reach the rank, in the order of the stored tensors, nothing twice."""
        order = {tensor.name: number for number, tensor in enumerate(self.stored)}
        return sorted(self._parts, key=lambda part: (order[part.name], part.box, part.dtype))

    @cached_property
    def _parts(self) -> list[Part]:
        seen = (self.stored[number] for number in self.seen)
        whole = (Part(tensor.name, tensor.shape, Box.whole(tensor.shape), tensor.dtype) for tensor in seen)
        return each_once([*whole, *(part for part, _ in self._copied)])

    @cached_property
    def _copied(self) -> list[tuple[Part, bool]]:
        """What each placement needs, and whether it is exactly that."""
        found, seen = [], frozenset(self.seen)
        for placement in self.placements:
            if placement.stored not in seen:
                tensor, held = self.stored[placement.stored], self.parameters[placement.parameter].dtype
                view = _box_of(tensor.shape, placement.view)
                box = Box.whole(tensor.shape) if view is None else view.box
                found.append((Part(tensor.name, tensor.shape, box, held), view is not None))
        return found

    def figures(self) -> Figures:
        exact = {part for part, is_exact in self._copied if is_exact}
        return Figures(
            stored=sum(tensor.nbytes for tensor in self.stored),
            parameters=sum(tensor.nbytes for tensor in self.parameters),
            wanted=sum(part.nbytes for part in self._parts),
            fast=sum(part.nbytes for part in self._parts if part in exact),
        )

    def digest(self) -> str:
        """Of everything above: equal digests, equal layouts. Not against forgery."""
        return xxhash.xxh3_128_hexdigest(self._payload)

    def pack(self) -> bytes:
        """Small: a few bytes a tensor."""
        return compress(self._payload)

    @cached_property
    def _payload(self) -> bytes:
        return pack_layout(self.stored, self.parameters, self.placements, self.seen)

    @classmethod
    def unpack(cls, data: bytes) -> TargetLayout:
        """Raises ``FormatError`` for what is no layout: wrong numbers, views outside their tensors, names twice."""
        return cls(*unpack_layout(data))


class _Places:
    """The model's parameters, and its buffers that were copied to, by the memory that they lie in."""

    def __init__(self, model: nn.Module, copies: Sequence[Copy]) -> None:
        self._kept = [copy.target.untyped_storage() for copy in copies]  # their identities must not be given to others
        touched = {storage_identity(copy.target) for copy in copies}
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        named += [(name, buffer) for name, buffer in model.named_buffers() if storage_identity(buffer) in touched]
        self.tensors = tuple(_described(name, tensor.dtype, tensor.shape) for name, tensor in named)
        self._names = [name for name, _ in named]
        self._by_memory: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, (_, tensor) in enumerate(named):
            self._by_memory.setdefault(storage_identity(tensor), []).append((number, tensor))

    def of(self, copy: Copy) -> tuple[int, StridedView]:
        target = copy.target
        first = int(target.storage_offset())
        last = first + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride()))
        for number, tensor in self._by_memory.get(storage_identity(target), ()):
            begin = int(tensor.storage_offset())
            if not begin <= first <= last < begin + tensor.numel() or tensor.dtype != target.dtype:
                continue
            if not tensor.is_contiguous():
                raise StateError(f"parameter {self._names[number]} is not contiguous; its layout cannot be noted")
            return number, StridedView(first - begin, tuple(target.shape), tuple(target.stride()))
        raise StateError(
            f"the loader copies {copy.name} into a tensor of shape {tuple(target.shape)} and {target.dtype} that is no "
            "part of a parameter or buffer of the model"
        )


_box_of = lru_cache(maxsize=1 << 14)(box_of)  # layers are alike, and so are experts


def _described(name: str, dtype: torch.dtype, shape: Sequence[int]) -> LayoutTensor:
    meta = basic_meta(dtype, tuple(shape))
    return LayoutTensor(name, meta.shape, meta.dtype)
