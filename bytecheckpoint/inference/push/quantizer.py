"""Quantize on senders: find the maxima of all blocks before the first write, then make weights and scales of them.

If any block is split between senders, the coordinator returns the largest maximum of each block to all that have
elements of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from ...engine.tensor_bytes import as_bytes, copy_elements
from ...planners.extents import runs_of
from ...runtime.threads import Threads
from ...tensors.geometry import Box
from ..layouts.hub_names import scale_name
from ..layouts.parts import torch_dtype_of
from .block_quantization import (
    QUANTIZED,
    Blocks,
    Scratch,
    blocks_of,
    cut_blocks,
    elements_of,
    grid_of,
    maxima_of,
    quantize,
    scales_of,
)
from .layout import Holding, Write, choose_senders
from .messages import Table, pack
from .sources import PushSource
from .transports.base import THREADS
from .transports.cuda_ipc import synchronize

_RUN_ELEMENTS, _BATCH_ELEMENTS = 4 << 20, 32 << 20  # whose maxima a thread finds, and that are fetched at once

BlocksOfBox = tuple[str, Box, Box]
"""A tensor, a box of its grid, and the box of elements of these blocks."""


@dataclass(frozen=True)
class MaximaExchange:
    """The boxes in which each sender finds maxima. ``grids`` has the shape of each tensor of scales, and ``split`` the
    tensors with blocks that no sender has completely."""

    grids: dict[str, tuple[int, ...]]
    boxes: list[list[BlocksOfBox]]
    split: set[str] = field(default_factory=set)

    def merge(self, gathered: Sequence[bytes]) -> list[bytes]:
        """Return what each sender receives: the float32 maxima of its blocks, one grid after another."""
        found = {name: np.zeros(shape, np.float32) for name, shape in self.grids.items()}
        for boxes, values in zip(self.boxes, gathered, strict=True):
            for (name, grid, _), part in zip(boxes, _unpack_maxima(values, boxes), strict=True):
                place = found[name][grid.slices()]
                np.maximum(place, part, out=place)  # keeps NaN
        return [b"".join(found[name][grid.slices()].tobytes() for name, grid, _ in one) for one in self.boxes]


def _unpack_maxima(values: bytes, boxes: Sequence[BlocksOfBox]) -> Iterator[npt.NDArray[np.float32]]:
    left = np.frombuffer(values, np.float32)
    for _, grid, _ in boxes:
        yield left[: grid.numel].reshape(grid.lengths)
        left = left[grid.numel :]


def pack_task(blocks: dict[str, Blocks], exchange: MaximaExchange, sender: int) -> bytes:
    """Pack what a sender's ``Quantizer`` must know."""
    return pack([blocks, bool(exchange.split), exchange.boxes[sender]])


class Quantizer:
    """Fetches and makes the elements of writes, for one push. Tensors that are not quantized pass through.

    The others need ``set_maxima`` first, of what ``MaximaExchange.merge`` returns if this push ``exchanges`` maxima,
    else of the own ``partial_maxima``.
    """

    def __init__(self, source: PushSource, task: bytes) -> None:
        found = msgpack.unpackb(task, use_list=False) if task else ({}, False, ())
        self._source, (self._blocks, self.exchanges, boxes) = source, found
        self._boxes = [(name, Box(*grid), Box(*box)) for name, grid, box in boxes]
        self._scaled = {scale_name(name): name for name in self._blocks}
        self._maxima = {
            name: torch.zeros(grid_of(meta.shape, self._blocks[name]), dtype=torch.float32)
            for name, meta in source.table.rows
            if name in self._blocks
        }
        self._scratch = Scratch()

    def partial_maxima(self) -> bytes:
        """Return the maxima of this sender's boxes, one grid after another."""

        def find(of_box: BlocksOfBox, elements: torch.Tensor) -> bytes:
            name, _, box = of_box
            return maxima_of(elements, box, self._blocks[name], self._scratch).numpy().tobytes()

        found: list[bytes] = []
        with Threads(THREADS, thread_name_prefix="bcp-push-maxima") as threads:
            for batch in runs_of(self._boxes, lambda of_box: of_box[2].numel, _BATCH_ELEMENTS):
                fetched = self._source.fetch([(name, box) for name, _, box in batch])
                synchronize(fetched)  # the threads use other streams than this one may
                found += threads.map(find, batch, fetched)
        return b"".join(found)

    def set_maxima(self, values: bytes) -> None:
        """Set the maxima of these blocks in all senders."""
        for (name, grid, _), maxima in zip(self._boxes, _unpack_maxima(values, self._boxes), strict=True):
            self._maxima[name][grid.slices()] = torch.from_numpy(maxima.copy())

    def fetch(self, writes: Sequence[Write]) -> list[torch.Tensor]:
        """Return the elements of ``writes``, the argument of ``fill``."""
        stored = [(write.name, write.box) for write in writes if write.name not in self._scaled]
        fetched = iter(self._source.fetch(stored))
        return [self._scales(write) if write.name in self._scaled else next(fetched) for write in writes]

    def _scales(self, write: Write) -> torch.Tensor:
        return scales_of(self._maxima[self._scaled[write.name]][write.box.slices()])

    def unchanged_bytes(self, elements: torch.Tensor, write: Write, device: torch.device) -> torch.Tensor | None:
        """Return the bytes of ``elements`` if they can be written unchanged from ``device``. Otherwise use ``fill``."""
        if self._quantizes(write) or elements.device != device or elements.dtype != torch_dtype_of(write.dtype):
            return None
        is_lazy = elements.is_conj() or elements.is_neg()
        return as_bytes(elements) if elements.is_contiguous() and not is_lazy else None

    def fill(self, out: torch.Tensor, elements: torch.Tensor, write: Write) -> None:
        """Cast or quantize ``elements`` into ``out``. Thread-safe."""
        if not self._quantizes(write):
            copy_elements(out, elements)
            return
        blocks = self._blocks[write.name]
        maxima = self._maxima[write.name][blocks_of(write.box, blocks).slices()]
        quantize(out, elements, write.box, maxima, blocks, self._scratch)

    def _quantizes(self, write: Write) -> bool:
        return write.dtype == QUANTIZED and write.name in self._blocks


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
    """Plan who finds which maxima. ``held`` is a result of ``holdings_of_blocks``, and ``table`` describes the tensors
    before they are quantized."""
    exchange = MaximaExchange({}, [[] for _ in range(senders)])
    for name, meta in table.rows:
        if name not in blocks:
            continue
        size = blocks[name]
        exchange.grids[name] = grid_of(meta.shape, size)
        for box, owners in held.get(name, ()):
            if not box.numel:
                continue
            if elements_of(blocks_of(box, size), meta.shape, size) != box:
                exchange.split.add(name)
            for rows in cut_blocks(box, size, _RUN_ELEMENTS):
                exchange.boxes[owners[0]].append((name, blocks_of(rows, size), rows))
    return exchange
