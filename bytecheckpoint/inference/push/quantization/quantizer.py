"""A sender's part of quantising: the maxima of the blocks that it writes of, each found once in a push."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgpack
import numpy as np
import torch

from ...engine.tensor_bytes import as_bytes, copy_elements
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import torch_dtype
from .block_plan import Exchange, Given
from .planning import Write
from .quantizing import (
    QUANTIZED,
    Blocks,
    Scratch,
    blocks_of,
    elements_of,
    grid_of,
    maxima_of,
    quantize,
    scale_name,
    scales_of,
    whole_blocks,
)
from .sources import Source

__all__ = ["Quantizer", "pack_task", "torch_dtype_of"]


class _Fetch(NamedTuple):
    """``box`` of a tensor is needed for the write of this ``number``; from it the maxima at ``grid`` are found."""

    number: int
    name: str
    box: Box
    grid: Box | None


def pack_task(blocks: dict[str, Blocks], exchange: Exchange, sender: int) -> bytes:
    """What a sender has to know for its ``Quantizer``."""
    gives = [[given.name, given.box, given.grid] for given in exchange.gives[sender]]
    packed: bytes = msgpack.packb([blocks, exchange.needed, gives, exchange.takes[sender]])
    return packed


class Quantizer:
    """For one push. Tensors that are not quantised pass through."""

    def __init__(self, source: Source, task: bytes) -> None:
        blocks, self.exchanges, gives, takes = msgpack.unpackb(task) if task else ({}, False, [], [])
        self._source = source
        self._gives = [Given(name, _box(*box), _box(*grid)) for name, box, grid in gives]
        self._takes = [(name, _box(*grid)) for name, grid in takes]
        self._blocks = {name: (rows, columns) for name, (rows, columns) in blocks.items()}
        self._scaled = {scale_name(name): name for name in blocks}
        self._shapes = {name: meta.shape for name, meta in source.table.rows if name in blocks}
        self._held: dict[str, list[Box]] = {}
        for name, box in source.held:
            if name in blocks:
                self._held.setdefault(name, []).append(box)
        self._tensors: dict[str, _Tensor] = {}
        self._scratch = Scratch()

    def given(self) -> bytes:
        """What others need of the blocks that this sender has a part of."""
        found = []
        for given in self._gives:
            blocks = self._blocks[given.name]
            box = elements_of(given.grid, self._shapes[given.name], blocks).intersect(given.box)
            assert box is not None
            (elements,) = self._source.fetch([(given.name, box)])
            found.append(maxima_of(elements, box, blocks, self._scratch).numpy().tobytes())
        return b"".join(found)

    def take(self, merged: bytes) -> None:
        """Maxima of blocks that are cut between senders."""
        left = np.frombuffer(merged, np.float32)
        for name, grid in self._takes:
            values = torch.from_numpy(left[: grid.numel].reshape(grid.lengths).copy())
            left = left[grid.numel :]
            self._of(name).keep(grid, values)

    def fetches(self, writes: Sequence[Write]) -> list[_Fetch]:
        """What has to be fetched for ``writes``, which are made next."""
        found = []
        for number, write in enumerate(writes):
            if write.name in self._scaled:
                name = self._scaled[write.name]
                found += [_Fetch(number, name, *both) for both in self._of(name).missing_scales(write.box)]
            elif self._quantizes(write):
                found.append(_Fetch(number, write.name, *self._of(write.name).missing(write.box)))
            else:
                found.append(_Fetch(number, write.name, write.box, None))
        return found

    def ready(
        self, writes: Sequence[Write], fetches: Sequence[_Fetch], fetched: Sequence[torch.Tensor], threads: Executor
    ) -> list[torch.Tensor]:
        """The elements of ``writes``, for ``fill``."""
        looks = [
            (fetch, grid, elements) for fetch, elements in zip(fetches, fetched, strict=True) if (grid := fetch.grid)
        ]
        list(threads.map(self._look, looks))
        by_number = {fetch.number: (fetch.box, elements) for fetch, elements in zip(fetches, fetched, strict=True)}
        found = []
        for number, write in enumerate(writes):
            if write.name in self._scaled:
                found.append(scales_of(self._tensors[self._scaled[write.name]].maxima[write.box.slices()]))
            else:
                box, elements = by_number[number]
                found.append(elements if box == write.box else elements[write.box.relative_to(box).slices()])
        return found

    def as_they_are(self, elements: torch.Tensor, write: Write, device: torch.device) -> torch.Tensor | None:
        """Their bytes, where these are what is to be written, in its order and on ``device``; else they have to be
        filled into memory that is."""
        if self._quantizes(write) or elements.device != device or elements.dtype != torch_dtype_of(write):
            return None
        return as_bytes(elements) if elements.is_contiguous() and not _is_lazy(elements) else None

    def fill(self, out: torch.Tensor, elements: torch.Tensor, write: Write) -> None:
        """Cast or quantise. In any thread."""
        if not self._quantizes(write):
            copy_elements(out, elements)
            return
        tensor = self._tensors[write.name]
        maxima = tensor.maxima[blocks_of(write.box, tensor.blocks).slices()]
        quantize(out, elements, write.box, maxima, tensor.blocks, self._scratch)

    def _quantizes(self, write: Write) -> bool:
        return write.dtype == QUANTIZED and write.name in self._blocks

    def _of(self, name: str) -> _Tensor:
        if name not in self._tensors:
            self._tensors[name] = _Tensor(self._shapes[name], self._blocks[name], self._held.get(name, []))
        return self._tensors[name]

    def _look(self, look: tuple[_Fetch, Box, torch.Tensor]) -> None:
        fetch, grid, elements = look
        tensor = self._tensors[fetch.name]
        box = elements_of(grid, tensor.shape, tensor.blocks)
        part = elements[box.relative_to(fetch.box).slices()]
        tensor.keep(grid, maxima_of(part, box, tensor.blocks, self._scratch))


class _Tensor:
    """What is known of a tensor's blocks: ``maxima`` of those that somebody has claimed, when all who did are ready."""

    def __init__(self, shape: tuple[int, ...], blocks: Blocks, held: Sequence[Box]) -> None:
        self.shape, self.blocks, self.held = shape, blocks, held
        self.maxima = torch.zeros(grid_of(shape, blocks))
        self._known = np.zeros(tuple(self.maxima.shape), bool)

    def keep(self, grid: Box, maxima: torch.Tensor) -> None:
        self.maxima[grid.slices()] = maxima
        self._known[grid.slices()] = True

    def missing(self, box: Box) -> tuple[Box, Box | None]:
        """What to fetch in order to quantise ``box``, and where in the grid maxima have to be found from it."""
        grid = self._claim(blocks_of(box, self.blocks))
        return (box, None) if grid is None else (_hull(box, elements_of(grid, self.shape, self.blocks)), grid)

    def missing_scales(self, grid: Box) -> list[tuple[Box, Box]]:
        """The same for scales: nothing, where the elements have been quantised before."""
        found = []
        for box in self.held:
            whole = whole_blocks(box, self.shape, self.blocks)
            there = None if whole is None else whole.intersect(grid)
            claimed = None if there is None else self._claim(there)
            if claimed is not None:
                found.append((elements_of(claimed, self.shape, self.blocks), claimed))
        return found

    def _claim(self, grid: Box) -> Box | None:
        """The smallest box with all blocks of ``grid`` that nobody has claimed yet."""
        unknown = ~self._known[grid.slices()]
        if not unknown.any():
            return None
        offsets, stops = [], []
        for d in range(unknown.ndim):
            there = np.flatnonzero(unknown.any(axis=tuple(other for other in range(unknown.ndim) if other != d)))
            offsets.append(grid.offsets[d] + int(there[0]))
            stops.append(grid.offsets[d] + int(there[-1]) + 1)
        found = _box(offsets, [stop - begin for begin, stop in zip(offsets, stops, strict=True)])
        self._known[found.slices()] = True
        return found


def torch_dtype_of(write: Write) -> torch.dtype:
    return torch_dtype(BasicMeta(write.dtype, ()))


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its bytes are not yet its values."""
    return tensor.is_conj() or tensor.is_neg()


def _hull(box: Box, other: Box) -> Box:
    """The smallest box with both."""
    offsets = tuple(map(min, box.offsets, other.offsets))
    return Box.proved(offsets, tuple(max(a, b) - o for a, b, o in zip(box.stops, other.stops, offsets)))


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> Box:
    return Box(tuple(offsets), tuple(lengths))
