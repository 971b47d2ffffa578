"""Share reads of the same bytes: each rank reads a part and forwards every packet around a ring.

Of n ranks each reads 1/n, and sends every packet that it has read or received to the next rank while more is read. No
connection carries a byte twice, and every rank sends as much as it receives. Large boxes are sent from the memory that
they are loaded into; small boxes, and memory that is not plain CPU memory, are packed into a buffer first.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import torch

from ...control.base import Operation
from ...engine.tensor_bytes import as_bytes, byte_view, copy_elements
from ...errors import ControlError
from ...planners import Batch, Packet, PartBox, Ring
from .exchange import Exchange, SharedBoxes, checksum_of

_MIN_UNPACKED_BYTES = 64 << 10  # a smaller part box is cheaper to pack with its neighbours than to send alone


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
        packer = _Packer(self._boxes)
        for segment, index in self._shares.link(self._index):
            checksum = self._wait_for_packet(segment, index)
            self._send(self._next, packer.views(self._segments[segment][index]), checksum)

    def _receive_all(self) -> None:
        packer = _Packer(self._boxes)
        for segment, index in self._shares.link(self._previous):
            packet = self._segments[segment][index]
            nbytes = sum(part_box.nbytes for part_box in packet)
            with self._timings.measure("exchange", nbytes):
                checksum = self._receive(self._previous, segment, packer.filled(packet), packet)
            self._received[self._previous] += nbytes
            self._add_packet(segment, index, checksum)

    def _read(self, batch: Batch, index: int) -> None:
        self._boxes.read(batch.reads, [self._boxes.memory(part_box) for part_box in batch.reads])
        packer = _Packer(self._boxes)
        for number, packet in enumerate(batch.packets):
            checksum = checksum_of(packer.views(packet)) if self._verify else 0
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


class _Packer:
    """The bytes of packets, viewed in place, or in one buffer if they are small or not plain CPU memory."""

    def __init__(self, boxes: SharedBoxes) -> None:
        self._boxes = boxes
        self._buffer: torch.Tensor | None = None

    def views(self, packet: Packet) -> Iterator[memoryview]:
        """The packet's bytes in order. Each view is valid until the next one is requested."""
        for plain, run in self._runs(packet):
            if plain is not None:
                yield byte_view(plain)
                continue
            buffer, at = self._buffer_for(run), 0
            for part_box in run:
                source = self._boxes.memory(part_box)
                if not _is_plain(source):
                    source = _empty_like(source)
                    copy_elements(source, self._boxes.memory(part_box))
                buffer[at : at + part_box.nbytes].copy_(as_bytes(source))
                at += part_box.nbytes
            yield byte_view(buffer)

    def filled(self, packet: Packet) -> Iterator[memoryview]:
        """Views to fill with the packet's bytes. Requesting the next view puts the previous one's bytes in place."""
        for plain, run in self._runs(packet):
            if plain is not None:
                yield byte_view(plain)
                continue
            buffer, at = self._buffer_for(run), 0
            yield byte_view(buffer)
            for part_box in run:
                out = self._boxes.memory(part_box)
                # A copy with its own memory: in the buffer, the part box may not be aligned for its dtype.
                target = out if _is_plain(out) else _empty_like(out)
                as_bytes(target).copy_(buffer[at : at + part_box.nbytes])
                if target is not out:
                    copy_elements(out, target)
                at += part_box.nbytes

    def _runs(self, packet: Packet) -> Iterator[tuple[torch.Tensor | None, Sequence[PartBox]]]:
        """Large part boxes of plain memory one by one, and runs of neighbouring part boxes that must be packed."""
        run: list[PartBox] = []
        for part_box in packet:
            memory = self._boxes.memory(part_box) if part_box.nbytes >= _MIN_UNPACKED_BYTES else None
            if memory is None or not _is_plain(memory):
                run.append(part_box)
                continue
            if run:
                yield None, run
                run = []
            yield memory, [part_box]
        if run:
            yield None, run

    def _buffer_for(self, run: Sequence[PartBox]) -> torch.Tensor:
        nbytes = sum(part_box.nbytes for part_box in run)
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return self._buffer[:nbytes]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
