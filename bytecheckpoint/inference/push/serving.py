"""Tensors that have their bytes in chunks: an engine's loader copies its parts out of them as if they were whole.

The same wrapper tensors as when the parts were learned, so the loader does the same; only that a copy into a parameter
now happens, at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from ...dtypes import DType
from ...engine.tensor_bytes import copy_elements
from ...errors import MismatchError
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import torch_dtype
from ..recording import Copy, Recorder
from ..strided import StridedView, box_of
from .layout import Layout
from .learning import part_with, wire_dtype
from .messages import Table

__all__ = ["Chunks", "ServedWeights", "Staged"]


class Chunks(ABC):
    """Where the bytes of a layout's chunks are."""

    @abstractmethod
    def get(self, chunk: int) -> torch.Tensor:
        """Its bytes, which stay as they are until ``used``."""

    @abstractmethod
    def used(self, chunk: int) -> None:
        """What was got has been copied. It may be got again."""


class Staged(Chunks):
    """All of them in one arena."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        self._layout, self._memory = layout, memory

    def get(self, chunk: int) -> torch.Tensor:
        begin = self._layout.offsets[chunk]
        return self._memory[begin : begin + self._layout.sizes[chunk]]

    def used(self, chunk: int) -> None:
        """It stays."""


class ServedWeights:
    """The tensors of ``table``, of which ``source`` has the parts of ``layout``."""

    def __init__(self, table: Table, layout: Layout, source: Chunks) -> None:
        self._metas = dict(table.rows)
        self._table, self._layout, self._source = table, layout, source
        self._chunks: dict[int, list[tuple[int, Box]]] = {}
        for number, (part, box) in enumerate(layout.chunks):
            self._chunks.setdefault(part, []).append((number, box))
        self._parts: dict[str, list[int]] = {}
        for number, wanted in enumerate(layout.parts):
            self._parts.setdefault(wanted.name, []).append(number)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``load_weights`` of an engine's models takes them."""
        return _Serving(self).tensors(self._table.metas())

    def copy(self, copy: Copy) -> None:
        """Carry out what the loader asked for."""
        if copy.target.is_meta or not copy.view.numel:
            return  # the engine only counts
        meta = self._metas[copy.name]
        found = box_of(meta.shape, copy.view)
        if found is not None:
            part = self._part_with(copy.name, found.box, wire_dtype(meta.dtype, copy.target))
            try:
                target = copy.target.permute(found.order).view(found.box.lengths)
            except RuntimeError:  # its own strides do not allow it
                pass
            else:
                self._fill(target, found.box, part)
                return
        copy_elements(copy.target, self._view(copy.name, copy.view, wire_dtype(meta.dtype, copy.target)))

    def values(self, name: str, view: StridedView) -> torch.Tensor:
        """A view of a tensor in its own type, in memory of its own."""
        return self._view(name, view, self._metas[name].dtype)

    def _view(self, name: str, view: StridedView, dtype: DType) -> torch.Tensor:
        meta = self._metas[name]
        found = box_of(meta.shape, view)
        box = Box.whole(meta.shape) if found is None else found.box
        part = self._part_with(name, box, dtype)
        out = torch.empty(box.lengths, dtype=self._dtype(part))
        self._fill(out, box, part)
        if found is None:
            return out.as_strided(view.shape, view.strides, view.offset)
        turned = out.reshape([view.shape[d] for d in found.order])
        return turned.permute(sorted(range(len(found.order)), key=found.order.__getitem__))

    def _fill(self, out: torch.Tensor, box: Box, part: int) -> None:
        for number, held in self._chunks.get(part, ()):
            common = box.intersect(held)
            if common is not None:
                chunk = self._source.get(number).view(self._dtype(part)).view(held.lengths)
                copy_elements(out[common.relative_to(box).slices()], chunk[common.relative_to(held).slices()])
                self._source.used(number)

    def _dtype(self, part: int) -> torch.dtype:
        wanted = self._layout.parts[part]
        return torch_dtype(BasicMeta(wanted.dtype, wanted.shape))

    def _part_with(self, name: str, box: Box, dtype: DType) -> int:
        stored = self._metas[name].dtype
        numbers = self._parts.get(name, ())
        for held in (dtype, stored):
            number = part_with(self._layout.parts, numbers, box, held)
            if number is not None:
                return number
        raise MismatchError(
            f"the engine's loader now wants {name} {box} as {dtype}, which it did not when it was asked what it wants; "
            "is what it does with weights decided by their values?"
        )


class _Serving(Recorder):
    def __init__(self, served: ServedWeights) -> None:
        super().__init__(served.values)
        self._served = served

    def note(self, copy: Copy) -> None:
        self._served.copy(copy)
