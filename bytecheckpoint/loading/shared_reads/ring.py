"""Share reads of the same bytes: each rank reads a part and forwards every packet around a ring.

Of n ranks each reads 1/n, and sends every packet that it has read or received to the next rank while more is read. No
connection carries a byte twice, and every rank sends as much as it receives. Large boxes are sent from the memory that
they are loaded into; small boxes, and memory that is not plain CPU memory, are packed into a buffer first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial

import torch

from ...control.base import Operation
from ...errors import ControlError
from ...planners.ring_plan import Batch, Packet, Ring
from .exchange import Exchange, Packer, SharedBoxes, checksum_of


class RingExchange(Exchange):
    """One rank in one ring."""

    def __init__(self, name: str, shares: Ring, boxes: SharedBoxes, op: Operation, readers: Executor) -> None:
        super().__init__(name, shares, boxes, op, readers)
        size = len(self._ranks)
        self._next, self._previous = (self._index + 1) % size, (self._index - 1) % size
        self._segments = [shares.packets(segment) for segment in range(size)]
        self._checksums: dict[tuple[int, int], int] = {}  # of the packets in this rank's memory, by segment and index
        self._changed = threading.Condition()
        self._stopped = False

    def tasks(self) -> Iterator[Callable[[], None]]:
        yield self._receive_all
        yield self._send_all

    def reads(self) -> Iterator[Callable[[], None]]:
        index = 0
        for batch in self._shares.segments[self._index]:
            yield partial(self._read, batch, index)
            index += len(batch.packets)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _send_all(self) -> None:
        packer = Packer()
        for segment, index in self._shares.link(self._index):
            checksum = self._wait_for_packet(segment, index)
            self._send(self._next, packer.views(self._memory(self._segments[segment][index])), checksum)

    def _receive_all(self) -> None:
        packer = Packer()
        for segment, index in self._shares.link(self._previous):
            packet = self._segments[segment][index]
            nbytes = sum(part_box.nbytes for part_box in packet)
            with self._timings.measure("exchange", nbytes):
                checksum = self._receive(self._previous, segment, packer.filled(self._memory(packet)), packet)
            self._received[self._previous] += nbytes
            self._add_packet(segment, index, checksum)

    def _read(self, batch: Batch, index: int) -> None:
        self._boxes.read(batch.reads, [self._boxes.memory(part_box) for part_box in batch.reads])
        packer = Packer()
        for number, packet in enumerate(batch.packets):
            checksum = checksum_of(packer.views(self._memory(packet))) if self._verify else 0
            self._add_packet(self._index, index + number, checksum)

    def _add_packet(self, segment: int, index: int, checksum: int) -> None:
        with self._changed:
            self._checksums[segment, index] = checksum
            self._changed.notify_all()

    def _wait_for_packet(self, segment: int, index: int) -> int:
        """Wait until this rank has the packet; its checksum."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (segment, index) in self._checksums)
            if self._stopped:
                raise ControlError("this rank stopped forwarding packets, because another of its reads failed")
            return self._checksums[segment, index]

    def _memory(self, packet: Packet) -> list[torch.Tensor]:
        return [self._boxes.memory(part_box) for part_box in packet]
