"""The target layout of one engine rank: which part of which stored tensor goes to which part of which parameter.

A layout is recorded once from the engine's own loader. It is then plain data that can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import nn

from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.layouts.parts import StridedView, TensorBox, box_of, without_duplicates
from bytecheckpoint.inference.layouts.recording import Copy, Recorder, storage_identity
from bytecheckpoint.tensors.dtypes import DType
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import basic_meta

__all__ = ["LayoutSizes", "LayoutTensor", "Placement", "TargetLayout"]


class LayoutTensor(NamedTuple):
    """Name, shape and dtype of a stored tensor or of one of the rank's parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Placement(NamedTuple):
    """A copy from ``view`` of stored tensor number ``stored`` to ``target`` of parameter number ``parameter``.

    Both views have the same shape. The copy casts to the parameter's dtype. If placements overlap, the later one wins.
    """

    stored: int
    view: StridedView
    parameter: int
    target: StridedView


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes in bytes.

    ``requested`` is what the rank must receive. ``fast`` is the part of it on the fast path: exactly the elements that
    parameters hold, not a whole tensor of which the rank holds only some elements or computes others.
    """

    stored: int
    parameters: int
    requested: int
    fast: int

    @property
    def share(self) -> float:
        """The fraction of the requested bytes that is on the fast path."""
        return self.fast / self.requested if self.requested else 1.0


@dataclass(frozen=True)
class TargetLayout:
    """The stored tensors, parameters and placements of one rank.

    ``seen`` lists the numbers of stored tensors whose values the loader computes with. The rank requests them as whole
    tensors, and no placement describes the result.
    """

    stored: tuple[LayoutTensor, ...]
    parameters: tuple[LayoutTensor, ...]
    placements: tuple[Placement, ...]
    seen: tuple[int, ...] = ()

    @classmethod
    def from_recording(
        cls, recorder: Recorder, stored: Iterable[tuple[str, Sequence[int], torch.dtype]], model: nn.Module
    ) -> TargetLayout:
        """The layout that ``recorder`` observed while ``model``'s loader consumed the tensors ``stored``.

        Raises ``StateError`` if the loader copied to anything but contiguous parameters and buffers of the model.
        """
        sources = tuple(_described(name, dtype, shape) for name, shape, dtype in stored)
        row = {tensor.name: number for number, tensor in enumerate(sources)}
        targets = _Targets(model, recorder.copies)
        placements = tuple(
            Placement(row[copy.name], copy.view, *targets.locate(copy)) for copy in recorder.copies if copy.view.numel
        )
        seen = tuple(sorted({row[name] for name, _ in recorder.seen}))
        return cls(sources, targets.tensors, placements, seen)

    def parts(self) -> list[TensorBox]:
        """The parts that the rank requests, in the order of the stored tensors and without duplicates."""
        order = {tensor.name: number for number, tensor in enumerate(self.stored)}
        seen = (self.stored[number] for number in self.seen)
        whole = (TensorBox(tensor.name, tensor.shape, Box.whole(tensor.shape), tensor.dtype) for tensor in seen)
        parts = without_duplicates([*whole, *(part for part, _ in self._copied)])
        return sorted(parts, key=lambda part: (order[part.name], part.box, part.dtype))

    @cached_property
    def _copied(self) -> list[tuple[TensorBox, bool]]:
        """The part that each placement requests, and whether it has exactly the placement's elements."""
        found, seen = [], frozenset(self.seen)
        for placement in self.placements:
            if placement.stored not in seen:
                tensor, dtype = self.stored[placement.stored], self.parameters[placement.parameter].dtype
                view = _box_of(tensor.shape, placement.view)
                box = Box.whole(tensor.shape) if view is None else view.box
                found.append((TensorBox(tensor.name, tensor.shape, box, dtype), view is not None))
        return found

    def sizes(self) -> LayoutSizes:
        """Sizes in bytes of the model, the rank and its requests."""
        parts = self.parts()
        exact = {part for part, is_exact in self._copied if is_exact}
        return LayoutSizes(
            stored=sum(tensor.nbytes for tensor in self.stored),
            parameters=sum(tensor.nbytes for tensor in self.parameters),
            requested=sum(part.nbytes for part in parts),
            fast=sum(part.nbytes for part in parts if part in exact),
        )


class _Targets:
    """The model's parameters, and the buffers that were copied to, indexed by storage."""

    def __init__(self, model: nn.Module, copies: Sequence[Copy]) -> None:
        # Keep the storages alive, so that their identities are not reused.
        self._storages = [copy.target.untyped_storage() for copy in copies]
        touched = {storage_identity(copy.target) for copy in copies}
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        named += [(name, buffer) for name, buffer in model.named_buffers() if storage_identity(buffer) in touched]
        self.tensors = tuple(_described(name, tensor.dtype, tensor.shape) for name, tensor in named)
        self._names = [name for name, _ in named]
        self._by_storage: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, (_, tensor) in enumerate(named):
            self._by_storage.setdefault(storage_identity(tensor), []).append((number, tensor))

    def locate(self, copy: Copy) -> tuple[int, StridedView]:
        """The number of the parameter that ``copy`` wrote to, and the view of it."""
        target = copy.target
        first = int(target.storage_offset())
        last = first + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride()))
        for number, tensor in self._by_storage.get(storage_identity(target), ()):
            begin = int(tensor.storage_offset())
            if not begin <= first <= last < begin + tensor.numel() or tensor.dtype != target.dtype:
                continue
            if not tensor.is_contiguous():
                raise StateError(f"parameter {self._names[number]} is not contiguous; its layout cannot be recorded")
            return number, StridedView(first - begin, tuple(target.shape), tuple(target.stride()))
        raise StateError(
            f"the loader copies {copy.name} into a tensor of shape {tuple(target.shape)} and {target.dtype} that is "
            "not part of a parameter or buffer of the model"
        )


_box_of = lru_cache(maxsize=1 << 14)(box_of)  # layers and experts repeat the same views


def _described(name: str, dtype: torch.dtype, shape: Sequence[int]) -> LayoutTensor:
    meta = basic_meta(dtype, tuple(shape))
    return LayoutTensor(name, meta.shape, meta.dtype)
