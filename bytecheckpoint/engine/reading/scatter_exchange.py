"""Reading frames of which several ranks want one stripe each: every rank reads some, and sends the others their parts.

Of n ranks each reads 1/n of the frames, in whole chunks, into memory of its own, a batch at a time while the batch
before is sent; takes its own stripe from it, and packs every other rank's. So a byte is read once where each rank for
itself would read all of them, and travels once, to the rank that wants it.

The reader checks the manifest's checksums. What it sends carries an xxh3, as in a ring (see ``ring_exchange``).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

import torch
import xxhash

from ...control.streams import Streams
from ...errors import CorruptionError
from ...geometry import Box
from ...planners import Batch, Ring, Slab
from ...trace import Timings
from ..tensor_bytes import byte_view, copy_elements

__all__ = ["ScatterJob", "ScatterMember"]

_AHEAD = 1  # batches being read while one is sent
_ALIGNMENT = 16  # of every part in what is sent, for any dtype
_HASH = struct.Struct("<Q")


@dataclass(frozen=True)
class ScatterJob:
    """``shares.ranks`` are in the order of their stripes, and ``shares.segments[i]`` is what ``ranks[i]`` reads.

    ``part`` is what of a slab belongs to a stripe, ``memory`` the view of this rank's memory for such a part, and
    ``dtype`` that of the elements there. ``read`` fills a tensor for each slab, and returns when all are checked.
    ``describe`` names a slab for people.
    """

    name: str
    shares: Ring
    part: Callable[[Slab, int], Box | None]
    memory: Callable[[Slab, Box], torch.Tensor]
    dtype: Callable[[Slab], torch.dtype]
    read: Callable[[Sequence[tuple[Slab, torch.Tensor]]], None]
    describe: Callable[[Slab], str]


class ScatterMember:
    """This rank's part in one job. ``work`` are tasks that wait for each other and for other ranks: each needs a
    thread. They raise what reading and the streams raise, and ``CorruptionError``."""

    def __init__(
        self, streams: Streams, rank: int, job: ScatterJob, readers: Executor, timings: Timings, *, verify: bool
    ) -> None:
        self._streams, self._job, self._readers, self._timings = streams, job, readers, timings
        self._verify = verify
        self._ranks = job.shares.ranks
        self._at = self._ranks.index(rank)
        self._received = [0] * len(self._ranks)

    @property
    def received(self) -> int:
        """Bytes from other ranks so far."""
        return sum(self._received)

    def work(self) -> Iterator[Callable[[], None]]:
        """Everything that is to be done."""
        yield self._deal_out
        for peer, batches in enumerate(self._job.shares.segments):
            if peer != self._at and batches:
                yield partial(self._receive_all, peer)

    def reads(self) -> Iterator[Callable[[], None]]:
        """Nothing that would not be asked for when its turn comes."""
        return iter(())

    def stop(self) -> None:
        """Nothing here waits but for reads, which end, and for other ranks."""

    def _deal_out(self) -> None:
        waiting: deque[tuple[Batch, Future[list[torch.Tensor]]]] = deque()
        try:
            for batch in self._job.shares.segments[self._at]:
                waiting.append((batch, self._readers.submit(self._read, batch)))
                if len(waiting) > _AHEAD:
                    self._deliver(*waiting.popleft())
            while waiting:
                self._deliver(*waiting.popleft())
        finally:
            wait([future for _, future in waiting if not future.cancel()])

    def _read(self, batch: Batch) -> list[torch.Tensor]:
        frames = [torch.empty(slab.box.lengths, dtype=self._job.dtype(slab)) for slab in batch.reads]
        self._job.read(list(zip(batch.reads, frames)))
        return frames

    def _deliver(self, batch: Batch, read: Future[list[torch.Tensor]]) -> None:
        frames = read.result()
        for peer, rank in enumerate(self._ranks):
            packed = _Packed.of(self._job, batch, peer)
            if peer == self._at:
                for index, box, _ in packed.parts:
                    slab = batch.reads[index]
                    copy_elements(self._job.memory(slab, box), _cut(frames[index], box, slab.box))
            elif packed.nbytes:
                buffer = torch.empty(packed.nbytes, dtype=torch.uint8)
                for index, box, begin in packed.parts:
                    part = _cut(frames[index], box, batch.reads[index].box)
                    copy_elements(_typed(buffer, begin, box, part.dtype), part)
                view = byte_view(buffer)
                self._streams.send(rank, self._job.name, view)
                if self._verify:
                    self._streams.send(rank, self._job.name, _HASH.pack(xxhash.xxh3_64_intdigest(view)))

    def _receive_all(self, peer: int) -> None:
        for batch in self._job.shares.segments[peer]:
            packed = _Packed.of(self._job, batch, self._at)
            if not packed.nbytes:
                continue
            buffer = torch.empty(packed.nbytes, dtype=torch.uint8)
            with self._timings.working("exchange", packed.nbytes):
                self._receive(peer, batch, byte_view(buffer))
                for index, box, begin in packed.parts:
                    slab = batch.reads[index]
                    copy_elements(self._job.memory(slab, box), _typed(buffer, begin, box, self._job.dtype(slab)))
            self._received[peer] += packed.nbytes

    def _receive(self, peer: int, batch: Batch, into: memoryview) -> None:
        rank = self._ranks[peer]
        self._streams.receive(rank, self._job.name, into)
        if not self._verify:
            return
        promised = bytearray(_HASH.size)
        self._streams.receive(rank, self._job.name, promised)
        if xxhash.xxh3_64_intdigest(into) != _HASH.unpack(promised)[0]:
            raise CorruptionError(
                f"part of {self._job.describe(batch.reads[0])} (or of one of {len(batch.reads) - 1} more) came damaged "
                f"from rank {rank}, which had read and checked it. What is stored is not at fault: load again, with "
                "share_reads='never' if need be, and look at the memory and network of these hosts"
            )


@dataclass(frozen=True)
class _Packed:
    """A stripe's parts of one batch in the bytes that are sent: index of the slab, box, and where they begin."""

    parts: list[tuple[int, Box, int]]
    nbytes: int

    @classmethod
    def of(cls, job: ScatterJob, batch: Batch, peer: int) -> _Packed:
        parts, at = [], 0
        for index, slab in enumerate(batch.reads):
            box = job.part(slab, peer)
            if box is not None:
                parts.append((index, box, at))
                nbytes = box.numel * job.dtype(slab).itemsize
                at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(parts, at)


def _typed(buffer: torch.Tensor, begin: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    return buffer[begin : begin + box.numel * dtype.itemsize].view(dtype).view(box.lengths)


def _cut(tensor: torch.Tensor, part: Box, whole: Box) -> torch.Tensor:
    return tensor[part.relative_to(whole).slices()]
