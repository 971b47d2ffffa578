"""Quantize on senders: find the maximum of each block once per push, and exchange those of tensors with split blocks.

A sender that holds all elements of a block needs no other sender. If any block of a tensor is split between senders,
each of them first finds the maxima of all blocks that it has elements of, and the coordinator returns the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from ...engine.tensor_bytes import as_bytes, copy_elements
from ...runtime.threads import Threads
from ...tensors.dtypes import DType
from ...tensors.geometry import Box
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
    quantize,
    scales_of,
)
from .layout import Holding, Write, choose_senders
from .messages import Table
from .sources import PushSource
from .transports.base import THREADS
from .transports.cuda_ipc import synchronize


class _Fetch(NamedTuple):
    """``box`` of a tensor, which write ``number`` needs. If ``grid`` is given, the box has all elements of these
    blocks, whose maxima are found from it."""

    number: int
    name: str
    box: Box
    grid: Box | None = None


@dataclass(frozen=True)
class MaximaExchange:
    """The exchange of maxima: the tensors with split blocks, and for each sender the grid and box that it has of them.

    ``grids`` has the shapes of the tensors of scales.
    """

    grids: dict[str, tuple[int, ...]]
    boxes: list[list[tuple[str, Box, Box]]]

    def merge(self, gathered: Sequence[bytes]) -> list[bytes]:
        """Return what each sender receives: the float32 maxima of its blocks, one grid after another."""
        found = {name: np.zeros(shape, np.float32) for name, shape in self.grids.items()}
        for boxes, values in zip(self.boxes, gathered, strict=True):
            for (name, grid, _), part in zip(boxes, _unpack_maxima(values, boxes), strict=True):
                place = found[name][grid.slices()]
                np.maximum(place, part, out=place)  # keeps NaN
        return [b"".join(found[name][grid.slices()].tobytes() for name, grid, _ in one) for one in self.boxes]


def _unpack_maxima(values: bytes, boxes: Sequence[tuple[str, Box, Box]]) -> Iterator[npt.NDArray[np.float32]]:
    left = np.frombuffer(values, np.float32)
    for _, grid, _ in boxes:
        yield left[: grid.numel].reshape(grid.lengths)
        left = left[grid.numel :]


def pack_task(blocks: dict[str, Blocks], exchange: MaximaExchange, sender: int) -> bytes:
    """Pack what a sender's ``Quantizer`` must know."""
    packed: bytes = msgpack.packb([blocks, bool(exchange.grids), exchange.boxes[sender]])
    return packed


class Quantizer:
    """Makes the elements of writes, for one push. Tensors that are not quantized pass through."""

    def __init__(self, source: PushSource, task: bytes) -> None:
        found = msgpack.unpackb(task, use_list=False) if task else ({}, False, ())
        self._source, (self._blocks, self.exchanges, boxes) = source, found
        self._exchanged = [(name, Box(*grid), Box(*box)) for name, grid, box in boxes]
        self._scaled = {scale_name(name): name for name in self._blocks}
        self._shapes = {name: meta.shape for name, meta in source.table.rows if name in self._blocks}
        self._held: dict[str, list[Box]] = {}
        for name, box in source.held:
            if name in self._blocks:
                self._held.setdefault(name, []).append(box)
        self._tensors: dict[str, _Tensor] = {}
        self._scratch = Scratch()

    def partial_maxima(self) -> bytes:
        """Return the maxima of this sender's boxes of tensors with split blocks, for ``MaximaExchange.merge``."""
        fetched = self._source.fetch([(name, box) for name, _, box in self._exchanged])
        synchronize(fetched)  # the threads use other streams than this one may

        def find(exchanged: tuple[str, Box, Box], elements: torch.Tensor) -> bytes:
            name, _, box = exchanged
            return maxima_of(elements, box, self._blocks[name], self._scratch).numpy().tobytes()

        with Threads(THREADS, thread_name_prefix="bcp-push-maxima") as threads:
            return b"".join(threads.map(find, self._exchanged, fetched))

    def set_maxima(self, merged: bytes) -> None:
        """Set the maxima of these blocks in all senders."""
        for (name, grid, _), maxima in zip(self._exchanged, _unpack_maxima(merged, self._exchanged), strict=True):
            self._tensor(name).set_maxima(grid, torch.from_numpy(maxima.copy()))

    def fetches(self, writes: Sequence[Write]) -> list[_Fetch]:
        """Return what must be fetched for ``writes``, which must be made next."""
        if not self._blocks:
            return [_Fetch(number, write.name, write.box) for number, write in enumerate(writes)]
        found = []
        for number, write in enumerate(writes):
            if write.name in self._scaled:
                name = self._scaled[write.name]
                grids = self._tensor(name).claim_held(write.box)
                found += [_Fetch(number, name, self._elements_of(name, grid), grid) for grid in grids]
            elif self._quantizes(write):
                grid = blocks_of(write.box, self._blocks[write.name])
                is_new = self._tensor(write.name).claim(grid)
                box = self._elements_of(write.name, grid) if is_new else write.box
                found.append(_Fetch(number, write.name, box, grid if is_new else None))
            else:
                found.append(_Fetch(number, write.name, write.box))
        return found

    def _elements_of(self, name: str, grid: Box) -> Box:
        return elements_of(grid, self._shapes[name], self._blocks[name])

    def elements(
        self, writes: Sequence[Write], fetches: Sequence[_Fetch], fetched: Sequence[torch.Tensor], threads: Executor
    ) -> Sequence[torch.Tensor]:
        """Return the elements of ``writes``, the argument of ``fill``."""
        if not self._blocks:
            return fetched
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
        tensor.set_maxima(fetch.grid, maxima_of(elements, fetch.box, tensor.blocks, self._scratch))


class _Tensor:
    """The ``maxima`` of a tensor's blocks. A block is claimed by the first fetch that finds its maximum."""

    def __init__(self, shape: tuple[int, ...], blocks: Blocks, held: Sequence[Box]) -> None:
        self.blocks, self._held = blocks, held
        self.maxima = torch.zeros(grid_of(shape, blocks), dtype=torch.float32)
        self._claimed = np.zeros(tuple(self.maxima.shape), bool)

    def set_maxima(self, grid: Box, maxima: torch.Tensor) -> None:
        self.maxima[grid.slices()] = maxima
        self._claimed[grid.slices()] = True

    def claim(self, grid: Box) -> bool:
        """Claim the blocks at ``grid``. Returns whether any of them was not claimed before."""
        was_claimed = bool(self._claimed[grid.slices()].all())
        self._claimed[grid.slices()] = True
        return not was_claimed

    def claim_held(self, grid: Box) -> list[Box]:
        """Claim the blocks at ``grid``. Returns those of each held box, if any of them was not claimed before."""
        common = (blocks_of(box, self.blocks).intersect(grid) for box in self._held)
        return [one for one in common if one is not None and self.claim(one)]


def holdings_of_blocks(
    held: Mapping[str, Sequence[Holding]], blocks: Mapping[str, Blocks], senders: int
) -> dict[str, list[Holding]]:
    """Return ``held`` with one owner per replicated box of a quantized tensor, so that only one sender computes its
    maxima, and with the senders that can write scales."""
    shared = [(name, holding) for name in blocks for holding in held.get(name, ())]
    owners = choose_senders([one.box.numel for _, one in shared], [one.senders for _, one in shared], senders)
    found = {name: list(holdings) for name, holdings in held.items()} | {name: [] for name in blocks}
    for (name, holding), owner in zip(shared, owners, strict=True):
        found[name].append(Holding(holding.box, (owner,)))
    for name, size in blocks.items():
        by_box: dict[Box, set[int]] = {}
        for box, holders in found[name]:
            if box.numel:
                by_box.setdefault(blocks_of(box, size), set()).update(holders)
        found[scale_name(name)] = [Holding(box, tuple(sorted(holders))) for box, holders in by_box.items()]
    return found


def plan_exchange(
    held: Mapping[str, Sequence[Holding]], table: Table, blocks: Mapping[str, Blocks], senders: int
) -> MaximaExchange:
    """Plan the exchange of maxima. ``held`` is a result of ``holdings_of_blocks``, and ``table`` describes the tensors
    before they are quantized."""
    exchange = MaximaExchange({}, [[] for _ in range(senders)])
    for name, meta in table.rows:
        if name in blocks:
            size = blocks[name]
            owned = [(blocks_of(box, size), box, owners[0]) for box, owners in held.get(name, ()) if box.numel]
            if any(elements_of(grid, meta.shape, size) != box for grid, box, _ in owned):
                exchange.grids[name] = grid_of(meta.shape, size)
                for grid, box, owner in owned:
                    exchange.boxes[owner].append((name, grid, box))
    return exchange


def torch_dtype_of(write: Write) -> torch.dtype:
    return _torch_dtype(write.dtype)


@cache
def _torch_dtype(dtype: DType) -> torch.dtype:
    return torch_dtype(BasicMeta(dtype, ()))
