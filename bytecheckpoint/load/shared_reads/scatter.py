"""Share reads of stripes: each rank reads some frames and sends every other rank its stripe of them.

Ranks that request one stripe each of the same frames (columns of a matrix that is stored by rows) would each read the
whole frames. Here each of n ranks reads 1/n of the frames, in whole chunks, a batch at a time while the previous batch
is sent. It keeps its own stripe and packs those of the other ranks. So a byte is read once and travels once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch

from ...engine.tensor_bytes import box_view, byte_view, copy_elements
from ...planners import Batch
from ...tensors.geometry import Box
from .exchange import Exchange, SharedBoxes, checksum_of

_BATCHES_AHEAD = 1  # being read while one is sent; more would only take more memory
_ALIGNMENT_BYTES = 16  # of every part in a message, enough for any dtype


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
        frames = read.result()
        for peer in range(len(self._ranks)):
            message = _Message.of(self._boxes, batch, peer)
            if peer == self._index:
                for index, box, _ in message.parts:
                    part_box = batch.reads[index]
                    copy_elements(self._boxes.memory(part_box, box), box_view(frames[index], box, part_box.box))
            elif message.nbytes:
                buffer = torch.empty(message.nbytes, dtype=torch.uint8)
                for index, box, begin in message.parts:
                    part = box_view(frames[index], box, batch.reads[index].box)
                    copy_elements(_elements(buffer, begin, box, part.dtype), part)
                views = [byte_view(buffer)]
                self._send(peer, views, checksum_of(views) if self._verify else 0)

    def _receive_all(self, peer: int) -> None:
        for batch in self._shares.segments[peer]:
            message = _Message.of(self._boxes, batch, self._index)
            if not message.nbytes:
                continue
            buffer = torch.empty(message.nbytes, dtype=torch.uint8)
            with self._timings.measure("exchange", message.nbytes):
                self._receive(peer, peer, iter([byte_view(buffer)]), batch.reads)
                for index, box, begin in message.parts:
                    part_box = batch.reads[index]
                    elements = _elements(buffer, begin, box, self._boxes.dtype(part_box))
                    copy_elements(self._boxes.memory(part_box, box), elements)
            self._received[peer] += message.nbytes


@dataclass(frozen=True)
class _Message:
    """One stripe of a batch in ``nbytes`` bytes. ``parts`` are indices, boxes, and offsets of bytes."""

    parts: list[tuple[int, Box, int]]
    nbytes: int

    @classmethod
    def of(cls, boxes: SharedBoxes, batch: Batch, peer: int) -> _Message:
        parts, at = [], 0
        for index, part_box in enumerate(batch.reads):
            box = boxes.stripe_box(part_box, peer)
            if box is not None:
                parts.append((index, box, at))
                nbytes = box.numel * boxes.dtype(part_box).itemsize
                at += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(parts, at)


def _elements(buffer: torch.Tensor, begin: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    return buffer[begin : begin + box.numel * dtype.itemsize].view(dtype).view(box.lengths)
