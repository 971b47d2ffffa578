"""Share reads of stripes: each rank reads some frames and sends every other rank its stripe of them.

Ranks that request one stripe each of the same frames (columns of a matrix that is stored by rows) would each read the
whole frames. Here each of n ranks reads 1/n of the frames, in whole chunks, a batch at a time while the previous batch
is sent. It keeps its own stripe and packs those of the other ranks. So a byte is read once and travels once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial

import torch

from ...engine.tensor_bytes import box_view, copy_elements
from ...planners.ring_plan import Batch
from ...tensors.geometry import Box
from .exchange import Exchange, Packer

_BATCHES_AHEAD = 1  # being read while one is sent; more would only take more memory


class ScatterExchange(Exchange):
    """One rank among those that request the stripes of the same frames. ``shares.ranks`` are in stripe order."""

    def tasks(self) -> Iterator[Callable[[], None]]:
        yield self._read_and_send
        for peer, batches in enumerate(self._shares.segments):
            if peer != self._index and batches:
                yield partial(self._receive_all, peer)

    def _read_and_send(self) -> None:
        reads: deque[tuple[Batch, Future[list[torch.Tensor]]]] = deque()
        try:
            for batch in self._shares.segments[self._index]:
                reads.append((batch, self._readers.submit(self._read, batch)))
                if len(reads) > _BATCHES_AHEAD:
                    self._distribute(*reads.popleft())
            while reads:
                self._distribute(*reads.popleft())
        finally:
            wait([future for _, future in reads if not future.cancel()])

    def _read(self, batch: Batch) -> list[torch.Tensor]:
        frames = [torch.empty(part_box.box.lengths, dtype=self._boxes.dtype(part_box)) for part_box in batch.reads]
        self._boxes.read(batch.reads, frames)
        return frames

    def _distribute(self, batch: Batch, read: Future[list[torch.Tensor]]) -> None:
        frames, packer = read.result(), Packer()
        for peer in range(len(self._ranks)):
            parts = [box_view(frames[index], box, batch.reads[index].box) for index, box in self._stripe(batch, peer)]
            if peer == self._index:
                for memory, part in zip(self._memory(batch), parts, strict=True):
                    copy_elements(memory, part)
            elif parts:
                self._send(peer, packer.views(parts))

    def _receive_all(self, peer: int) -> None:
        packer = Packer()
        for batch in self._shares.segments[peer]:
            memory = self._memory(batch)
            if memory:
                nbytes = sum(part.nbytes for part in memory)
                with self._timings.measure("exchange", nbytes):
                    self._receive(peer, peer, packer.filled(memory), batch.reads)
                self._received[peer] += nbytes

    def _stripe(self, batch: Batch, peer: int) -> list[tuple[int, Box]]:
        """The boxes of a batch in one stripe, each with the index of its read."""
        boxes = [(index, self._boxes.stripe_box(part_box, peer)) for index, part_box in enumerate(batch.reads)]
        return [(index, box) for index, box in boxes if box is not None]

    def _memory(self, batch: Batch) -> list[torch.Tensor]:
        """This rank's memory of its stripe of a batch."""
        return [self._boxes.memory(batch.reads[index], box) for index, box in self._stripe(batch, self._index)]
