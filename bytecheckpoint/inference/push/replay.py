"""Fill the layers of a model with the copies that its loader was recorded to make, without running the loader again.

A layer can be replayed if everything that the loader writes into its tensors is a copy of recorded tensors. The other
layers, and all that shares a stored tensor with them, remain to the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...engine.tensor_bytes import copy_elements
from ...tensors.geometry import Box, row_major_strides
from ...tensors.metadata import BasicMeta
from ..layouts.parts import box_to_read, torch_dtype_of
from ..layouts.recording import Copy, UnrecordedWrites, storage_identity
from .layout import Layout


class Fill(NamedTuple):
    """A copy of ``box`` of a requested part into a tensor, at ``offset`` and with ``strides`` in elements."""

    part: int
    box: Box
    offset: int
    strides: tuple[int, ...]


LayerFills = Mapping[str, Sequence[Fill]]
"""The fills of each tensor of a layer, in the loader's order."""


class RecordedLayers:
    """The layers of a model, which a recorded loader fills."""

    def __init__(self, made: nn.Module) -> None:
        self._layers = dict(made.named_modules())
        self._tensors = {name: _tensors_of(layer) for name, layer in self._layers.items()}
        # Kept, so that no other storage gets the identity of one of these.
        self._storages = {
            layer: {name: tensor.untyped_storage() for name, tensor in tensors.items()}
            for layer, tensors in self._tensors.items()
        }
        owned: dict[int, list[tuple[str, str]]] = {}
        for layer, tensors in self._tensors.items():
            for name, tensor in tensors.items():
                owned.setdefault(storage_identity(tensor), []).append((layer, name))
        self._of = {storage: where[0] for storage, where in owned.items()}
        self._sharing = {layer for where in owned.values() if len(where) > 1 for layer, _ in where}

    def of(self, tensor: torch.Tensor) -> str | None:
        """The name of the layer that has the memory of a tensor."""
        return self._of.get(storage_identity(tensor), (None, ""))[0]

    def by_layer(self, copies: Sequence[Copy]) -> list[Copy]:
        """Return the copies layer by layer, each layer where its last tensor is."""
        layers = [self.of(copy.target) for copy in copies]
        last = dict(zip(layers, range(len(layers)), strict=True))
        order = sorted(range(len(layers)), key=lambda number: (last[layers[number]], number))
        return [copies[number] for number in order]

    def fills(
        self,
        metas: Mapping[str, BasicMeta],
        copies: Sequence[Copy],
        numbers: Mapping[int, int | None],
        own: UnrecordedWrites,
        can_replay: Callable[[str, nn.Module], bool],
    ) -> dict[str, dict[str, list[Fill]]]:
        """Return the fills of the layers that can be replayed. ``numbers`` has the part of each copy."""
        found: dict[str, dict[str, list[Fill]]] = {}
        refused = self._sharing | {self.of(target) for target in own.targets}
        for name, layer in self._layers.items():
            storages = {key: storage_identity(tensor) for key, tensor in _tensors_of(layer).items()}
            is_same = storages == {key: int(storage._cdata) for key, storage in self._storages[name].items()}
            if not is_same or not can_replay(name, layer):
                refused.add(name)
        if refused.issuperset(self._layers):
            return {}
        for at, copy in enumerate(copies):
            layer, tensor = self._of.get(storage_identity(copy.target), (None, ""))
            if not copy.view.numel:
                continue
            box = box_to_read(metas[copy.name].shape, copy.view)
            number, target = numbers.get(at), box.undo(copy.target)
            if layer is None or number is None or target is None:
                refused.add(layer)
                continue
            offset = int(target.storage_offset()) - int(self._tensors[layer][tensor].storage_offset())
            of_layer = found.setdefault(layer, {})
            of_layer.setdefault(tensor, []).append(Fill(number, box.box, offset, target.stride()))
        names = [(self.of(copy.target), copy.name) for copy in copies]
        while True:  # what shares a stored tensor with a layer that is not replayed is not replayed either
            shared = {name for layer, name in names if layer in refused}
            more = {layer for layer, name in names if name in shared} - refused
            if not more:
                return {layer: of_layer for layer, of_layer in found.items() if layer not in refused}
            refused |= more


def _tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}


class _Dimension(NamedTuple):
    size: int
    source: int  # strides
    target: int


@dataclass(frozen=True)
class StridedCopy:
    """A copy between memory and a tensor; offsets and strides count elements."""

    dtype: torch.dtype
    source: int
    target: int
    dimensions: tuple[_Dimension, ...]

    def run(self, memory: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from ``memory``, which holds bytes."""
        shape = [one.size for one in self.dimensions]
        source = memory.view(self.dtype).as_strided(shape, [one.source for one in self.dimensions], self.source)
        begin = int(target.storage_offset()) + self.target
        copy_elements(target.as_strided(shape, [one.target for one in self.dimensions], begin), source)


class Replay:
    """The fills of some layers by their names, as few copies from memory in ``layout``. ``others`` are the stored
    tensors that the loader needs for the other layers."""

    def __init__(self, layers: Mapping[str, LayerFills], others: Collection[str], layout: Layout) -> None:
        self.others = others
        self.copies = {
            layer: {name: _joined(list(_copies(fills, layout))) for name, fills in tensors.items()}
            for layer, tensors in layers.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self.copies)

    def fill(self, layer: str, tensors: Mapping[str, torch.Tensor], memory: torch.Tensor) -> None:
        """Write the tensors of a layer, with the bytes of ``memory``."""
        for name, copies in self.copies[layer].items():
            for copy in copies:
                copy.run(memory, tensors[name].detach())


def _copies(fills: Iterable[Fill], layout: Layout) -> Iterator[StridedCopy]:
    for fill in fills:
        requested = layout.parts[fill.part]
        dtype = torch_dtype_of(requested.dtype)
        for number, held, common in layout.overlaps(fill.part, fill.box):
            strides = row_major_strides(held.lengths)
            source = layout.offsets[number] // requested.dtype.itemsize + _at(common.relative_to(held), strides)
            target = fill.offset + _at(common.relative_to(fill.box), fill.strides)
            yield StridedCopy(dtype, source, target, tuple(map(_Dimension, common.lengths, strides, fill.strides)))


def _at(box: Box, strides: Sequence[int]) -> int:
    return sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))


def _joined(copies: list[StridedCopy]) -> list[StridedCopy]:
    """Join copies at equal distances, then these again."""
    while len(stacked := list(_stacked(copies))) < len(copies):
        copies = stacked
    return copies


def _stacked(copies: Sequence[StridedCopy]) -> Iterator[StridedCopy]:
    at = 0
    while at < len(copies):
        first, count = copies[at], 1
        step = _step(copies, at)
        while step is not None and _step(copies, at + count - 1) == step:
            count += 1
        outer = () if step is None else (_Dimension(count, *step),)
        yield StridedCopy(first.dtype, first.source, first.target, (*outer, *first.dimensions))
        at += count


def _step(copies: Sequence[StridedCopy], at: int) -> tuple[int, int] | None:
    """Return the distances from a copy to the next one, if that is equal and does not overlap it: the later one would
    have to be last."""
    if at + 1 >= len(copies):
        return None
    one, other = copies[at], copies[at + 1]
    if (one.dtype, one.dimensions) != (other.dtype, other.dimensions):
        return None
    step = other.source - one.source, other.target - one.target
    extent = 1 + sum((dimension.size - 1) * dimension.target for dimension in one.dimensions)
    return step if step[0] > 0 and step[1] >= extent else None
