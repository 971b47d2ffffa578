"""Quantize on senders: find the maximum of each block once per push, and exchange those of blocks that are split.

A sender that holds all elements of a block needs no other sender. For a block that is split between senders, each of
them finds the maximum of its part, and the coordinator sends the largest of these to all that write a part of the
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import numpy as np
import torch

from ...engine.tensor_bytes import as_bytes, copy_elements
from ...tensors.geometry import Box, find_overlap
from ...tensors.metadata import BasicMeta
from ...tensors.shards import torch_dtype
from ..layouts.hub_names import scale_name
from .block_quantization import (
    QUANTIZED,
    Blocks,
    Scratch,
    blocks_of,
    elements_of,
    grid_of,
    maxima_of,
    partial_blocks,
    quantize,
    scales_of,
    whole_blocks,
)
from .layout import Holding, Write
from .messages import Table
from .sources import PushSource


class _Fetch(NamedTuple):
    """``box`` of a tensor, which write ``number`` needs. If ``grid`` is given, its maxima are found from the box."""

    number: int
    name: str
    box: Box
    grid: Box | None


class PartialMaxima(NamedTuple):
    """The maxima that a sender finds in ``box`` for the blocks at ``grid``."""

    name: str
    box: Box
    grid: Box


@dataclass(frozen=True)
class MaximaExchange:
    """The exchange of maxima: what each sender sends, the blocks that it receives, and the grids of the tensors."""

    sends: list[list[PartialMaxima]]
    receives: list[list[tuple[str, Box]]]
    grids: dict[str, tuple[int, ...]]

    @property
    def needed(self) -> bool:
        return any(self.receives)

    def merge(self, gathered: Sequence[bytes]) -> list[bytes]:
        """Return what each sender receives: float32 maxima, one grid after another."""
        found = {name: np.zeros(shape, np.float32) for name, shape in self.grids.items()}
        for sends, values in zip(self.sends, gathered, strict=True):
            left = np.frombuffer(values, np.float32)
            for partial in sends:
                part = left[: partial.grid.numel].reshape(partial.grid.lengths)
                left = left[partial.grid.numel :]
                place = found[partial.name][partial.grid.slices()]
                np.maximum(place, part, out=place)  # keeps NaN
        return [b"".join(found[name][grid.slices()].tobytes() for name, grid in one) for one in self.receives]


def pack_task(blocks: dict[str, Blocks], exchange: MaximaExchange, sender: int) -> bytes:
    """Pack what a sender's ``Quantizer`` must know."""
    packed: bytes = msgpack.packb([blocks, exchange.needed, exchange.sends[sender], exchange.receives[sender]])
    return packed


class Quantizer:
    """Makes the elements of writes, for one push. Tensors that are not quantized pass through."""

    def __init__(self, source: PushSource, task: bytes) -> None:
        found = msgpack.unpackb(task, use_list=False) if task else ({}, False, (), ())
        blocks, self.exchanges, sends, receives = found
        self._source, self._blocks = source, blocks
        self._sends = [PartialMaxima(name, Box(*box), Box(*grid)) for name, box, grid in sends]
        self._receives = [(name, Box(*grid)) for name, grid in receives]
        self._scaled = {scale_name(name): name for name in blocks}
        self._shapes = {name: meta.shape for name, meta in source.table.rows if name in blocks}
        self._held: dict[str, list[Box]] = {}
        for name, box in source.held:
            if name in blocks:
                self._held.setdefault(name, []).append(box)
        self._tensors: dict[str, _Tensor] = {}
        self._scratch = Scratch()

    def partial_maxima(self) -> bytes:
        """Return this sender's maxima of split blocks, packed for ``MaximaExchange.merge``."""
        found = []
        for partial in self._sends:
            blocks = self._blocks[partial.name]
            box = elements_of(partial.grid, self._shapes[partial.name], blocks).intersect(partial.box)
            assert box is not None
            (elements,) = self._source.fetch([(partial.name, box)])
            found.append(maxima_of(elements, box, blocks, self._scratch).numpy().tobytes())
        return b"".join(found)

    def set_maxima(self, merged: bytes) -> None:
        """Set the maxima of split blocks."""
        left = np.frombuffer(merged, np.float32)
        for name, grid in self._receives:
            values = torch.from_numpy(left[: grid.numel].reshape(grid.lengths).copy())
            left = left[grid.numel :]
            self._tensor(name).set_maxima(grid, values)

    def fetches(self, writes: Sequence[Write]) -> list[_Fetch]:
        """Return what must be fetched for ``writes``, which must be made next."""
        found = []
        for number, write in enumerate(writes):
            if write.name in self._scaled:
                name = self._scaled[write.name]
                found += [_Fetch(number, name, *both) for both in self._tensor(name).missing_scales(write.box)]
            elif self._quantizes(write):
                found.append(_Fetch(number, write.name, *self._tensor(write.name).missing(write.box)))
            else:
                found.append(_Fetch(number, write.name, write.box, None))
        return found

    def elements(
        self, writes: Sequence[Write], fetches: Sequence[_Fetch], fetched: Sequence[torch.Tensor], threads: Executor
    ) -> list[torch.Tensor]:
        """Return the elements of ``writes``, the argument of ``fill``."""
        pairs = list(zip(fetches, fetched, strict=True))
        list(threads.map(self._find_maxima, [pair for pair in pairs if pair[0].grid is not None]))
        by_number = {fetch.number: (fetch.box, elements) for fetch, elements in pairs}
        found = []
        for number, write in enumerate(writes):
            if write.name in self._scaled:
                found.append(scales_of(self._tensors[self._scaled[write.name]].maxima[write.box.slices()]))
            else:
                box, elements = by_number[number]
                found.append(elements if box == write.box else elements[write.box.relative_to(box).slices()])
        return found

    def unchanged_bytes(self, elements: torch.Tensor, write: Write, device: torch.device) -> torch.Tensor | None:
        """Return the bytes of ``elements`` if they can be written unchanged from ``device``. Otherwise use ``fill``."""
        if self._quantizes(write) or elements.device != device or elements.dtype != torch_dtype_of(write):
            return None
        is_lazy = elements.is_conj() or elements.is_neg()
        return as_bytes(elements) if elements.is_contiguous() and not is_lazy else None

    def fill(self, out: torch.Tensor, elements: torch.Tensor, write: Write) -> None:
        """Cast or quantize ``elements`` into ``out``. Thread-safe."""
        if not self._quantizes(write):
            copy_elements(out, elements)
            return
        tensor = self._tensors[write.name]
        maxima = tensor.maxima[blocks_of(write.box, tensor.blocks).slices()]
        quantize(out, elements, write.box, maxima, tensor.blocks, self._scratch)

    def _quantizes(self, write: Write) -> bool:
        return write.dtype == QUANTIZED and write.name in self._blocks

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            self._tensors[name] = _Tensor(self._shapes[name], self._blocks[name], self._held.get(name, []))
        return self._tensors[name]

    def _find_maxima(self, pair: tuple[_Fetch, torch.Tensor]) -> None:
        fetch, elements = pair
        assert fetch.grid is not None
        tensor = self._tensors[fetch.name]
        box = elements_of(fetch.grid, tensor.shape, tensor.blocks)
        part = elements[box.relative_to(fetch.box).slices()]
        tensor.set_maxima(fetch.grid, maxima_of(part, box, tensor.blocks, self._scratch))


class _Tensor:
    """The ``maxima`` of a tensor's blocks. A block is claimed by the fetch that finds its maximum."""

    def __init__(self, shape: tuple[int, ...], blocks: Blocks, held: Sequence[Box]) -> None:
        self.shape, self.blocks, self.held = shape, blocks, held
        self.maxima = torch.zeros(grid_of(shape, blocks), dtype=torch.float32)
        self._claimed = np.zeros(tuple(self.maxima.shape), bool)

    def set_maxima(self, grid: Box, maxima: torch.Tensor) -> None:
        self.maxima[grid.slices()] = maxima
        self._claimed[grid.slices()] = True

    def missing(self, box: Box) -> tuple[Box, Box | None]:
        """Return the box to fetch in order to quantize ``box``, and the blocks whose maxima it provides."""
        grid = self._claim(blocks_of(box, self.blocks))
        return (box, None) if grid is None else (_hull(box, elements_of(grid, self.shape, self.blocks)), grid)

    def missing_scales(self, grid: Box) -> list[tuple[Box, Box]]:
        """Return the boxes to fetch for the scales at ``grid``; nothing for blocks that were quantized before."""
        found = []
        for box in self.held:
            whole = whole_blocks(box, self.shape, self.blocks)
            common = None if whole is None else whole.intersect(grid)
            claimed = None if common is None else self._claim(common)
            if claimed is not None:
                found.append((elements_of(claimed, self.shape, self.blocks), claimed))
        return found

    def _claim(self, grid: Box) -> Box | None:
        """Claim the smallest box that contains all unclaimed blocks of ``grid``."""
        unclaimed = ~self._claimed[grid.slices()]
        if not unclaimed.any():
            return None
        offsets, lengths = [], []
        for d in range(unclaimed.ndim):
            used = np.flatnonzero(unclaimed.any(axis=tuple(other for other in range(unclaimed.ndim) if other != d)))
            offsets.append(grid.offsets[d] + int(used[0]))
            lengths.append(int(used[-1]) + 1 - int(used[0]))
        found = Box(tuple(offsets), tuple(lengths))
        self._claimed[found.slices()] = True
        return found


def holdings_of_blocks(
    held: Mapping[str, Sequence[Holding]], blocks: Mapping[str, Blocks], senders: int
) -> dict[str, list[Holding]]:
    """Return ``held`` with one owner per replicated box of a quantized tensor, so that only one sender computes its
    maxima, and with the senders that can write scales."""
    load = [0] * senders
    found = {name: list(holdings) for name, holdings in held.items()}
    replicated: list[tuple[int, str, Holding]] = []
    for name in blocks:
        for holding in held.get(name, ()):
            if len(holding.senders) == 1:
                load[holding.senders[0]] += holding.box.numel
            else:
                replicated.append((-holding.box.numel, name, holding))
        found[name] = [holding for holding in held.get(name, ()) if len(holding.senders) == 1]
    for weight, name, holding in sorted(replicated):
        owner = min(holding.senders, key=lambda sender: (load[sender], sender))
        load[owner] -= weight
        found[name].append(Holding(holding.box, (owner,)))
    for name, size in blocks.items():
        by_box: dict[Box, set[int]] = {}
        for box, owners in found[name]:
            if box.numel:
                by_box.setdefault(blocks_of(box, size), set()).update(owners)
        found[scale_name(name)] = [Holding(box, tuple(sorted(owners))) for box, owners in by_box.items()]
    return found


def plan_exchange(
    held: Mapping[str, Sequence[Holding]], table: Table, blocks: Mapping[str, Blocks], senders: int
) -> MaximaExchange:
    """Plan the exchange of maxima. ``held`` and ``table`` describe the tensors before they are quantized."""
    exchange = MaximaExchange([[] for _ in range(senders)], [[] for _ in range(senders)], {})
    shapes = {name: meta.shape for name, meta in table.rows if name in blocks}
    for name, shape in shapes.items():
        size = blocks[name]
        split = {holding: partial_blocks(holding.box, shape, size) for holding in held.get(name, ())}
        if not any(split.values()):
            continue
        exchange.grids[name] = grid_of(shape, size)
        for holding, grids in _partial(split, size):
            exchange.sends[holding.senders[0]] += [PartialMaxima(name, holding.box, grid) for grid in grids]
        received = dict.fromkeys(
            (sender, grid) for one, grids in split.items() for sender in one.senders for grid in grids
        )
        for sender, grid in received:
            exchange.receives[sender].append((name, grid))
    return exchange


def _partial(split: Mapping[Holding, list[Box]], blocks: Blocks) -> Iterator[tuple[Holding, list[Box]]]:
    """Yield for each holding where it has elements of a block that some holding has only in part."""
    boxes = [holding.box for holding in split]
    if find_overlap(np.array([b.offsets for b in boxes]), np.array([b.lengths for b in boxes])) is None:
        yield from split.items()
        return
    everywhere = dict.fromkeys(grid for grids in split.values() for grid in grids)
    for holding in split:
        if holding.box.numel:
            touched = blocks_of(holding.box, blocks)
            yield holding, [common for grid in everywhere if (common := touched.intersect(grid)) is not None]


def torch_dtype_of(write: Write) -> torch.dtype:
    return torch_dtype(BasicMeta(write.dtype, ()))


def _hull(box: Box, other: Box) -> Box:
    """Return the smallest box that contains both."""
    offsets = tuple(map(min, box.offsets, other.offsets))
    return Box.unchecked(offsets, tuple(max(a, b) - o for a, b, o in zip(box.stops, other.stops, offsets, strict=True)))
