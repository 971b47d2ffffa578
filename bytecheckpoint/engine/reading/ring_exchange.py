"""Reading on one rank what several want, and passing it on round a ring, while more is being read.

Of n ranks each reads 1/n and hands every piece that it has read or received to the next, until all have all: no link
carries a byte twice, and every rank sends as much as it receives. Pieces go from where they are loaded to where they
are loaded; only what is not plain memory there (or is small) is packed.

The reader checks its bytes against the manifest and takes an xxh3 of each piece as it lies in its memory; the hash
travels with the piece, and every rank on its way compares it. The manifest's own checksums would not do: pieces are of
elements as they were asked for, cast maybe, and begin where no chunk does. TCP's checksum misses one damaged segment in
65,536, and knows nothing of damage in a host's memory; xxh3 costs less than a tenth of the time on the wire.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import xxhash

from ...control.streams import Streams
from ...errors import ControlError, CorruptionError
from ...planners import Batch, Piece, Ring, Slab
from ...trace import Timings
from ..tensor_bytes import as_bytes, byte_view, copy_elements

__all__ = ["RingJob", "RingMember"]

_SMALL = 64 << 10  # bytes of a slab that is cheaper to pack with its neighbours than to send alone
_HASH = struct.Struct("<Q")


@dataclass(frozen=True)
class RingJob:
    """One ring, and where its bytes are on this rank.

    ``memory`` gives the view that holds a slab, ``read`` fills those of some slabs and returns when they are checked;
    it may be called from several threads at once. ``describe`` names a slab for people.
    """

    name: str
    ring: Ring
    memory: Callable[[Slab], torch.Tensor]
    read: Callable[[Sequence[Slab]], None]
    describe: Callable[[Slab], str]


class RingMember:
    """This rank in one ring."""

    def __init__(self, streams: Streams, rank: int, job: RingJob, verify: bool, timings: Timings) -> None:
        ring = job.ring
        self._streams, self._job, self._verify, self._timings = streams, job, verify, timings
        self._at, self._size = ring.ranks.index(rank), len(ring.ranks)
        self._next, self._previous = ring.ranks[(self._at + 1) % self._size], ring.ranks[self._at - 1]
        self._pieces = [ring.pieces(segment) for segment in range(self._size)]
        self._here: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self.received = 0

    def work(self) -> Iterator[Callable[[], None]]:
        """What waits for other ranks, and for what is read here."""
        yield self.receive_all
        yield self.send_all

    def reads(self) -> Iterator[Callable[[], None]]:
        """Work for the reading threads, in order."""
        index = 0
        for batch in self._job.ring.segments[self._at]:
            yield partial(self._read, batch, index)
            index += len(batch.pieces)

    def send_all(self) -> None:
        packer = _Packer(self._job.memory)
        for segment, index in self._job.ring.link(self._at):
            checksum = self._await(segment, index)
            for view in packer.views(self._pieces[segment][index]):
                self._streams.send(self._next, self._job.name, view)
            if self._verify:
                self._streams.send(self._next, self._job.name, _HASH.pack(checksum))

    def receive_all(self) -> None:
        packer = _Packer(self._job.memory)
        for segment, index in self._job.ring.link((self._at - 1) % self._size):
            piece = self._pieces[segment][index]
            nbytes = sum(slab.nbytes for slab in piece)
            with self._timings.working("exchange", nbytes):
                checksum = self._receive(packer, piece, segment)
            self.received += nbytes
            self._arrived(segment, index, checksum)

    def stop(self) -> None:
        """End the wait of ``send_all`` for a piece that will not come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _read(self, batch: Batch, index: int) -> None:
        self._job.read(batch.reads)
        packer = _Packer(self._job.memory)
        for number, piece in enumerate(batch.pieces):
            checksum = _checksum(packer.views(piece)) if self._verify else 0
            self._arrived(self._at, index + number, checksum)

    def _receive(self, packer: _Packer, piece: Piece, segment: int) -> int:
        hasher = xxhash.xxh3_64()
        for view in packer.filled(piece):
            self._streams.receive(self._previous, self._job.name, view)
            if self._verify:
                hasher.update(view)
        if not self._verify:
            return 0
        promised = bytearray(_HASH.size)
        self._streams.receive(self._previous, self._job.name, promised)
        (checksum,) = _HASH.unpack(promised)
        if hasher.intdigest() != checksum:
            more = f" (or one of {len(piece) - 1} more)" if len(piece) > 1 else ""
            raise CorruptionError(
                f"{self._job.describe(piece[0])}{more} came damaged from rank {self._previous}; "
                f"rank {self._job.ring.ranks[segment]} had read and checked them. What is stored is not at fault: load "
                "again, with share_reads='never' if need be, and look at the memory and network of these hosts"
            )
        return int(checksum)

    def _arrived(self, segment: int, index: int, checksum: int) -> None:
        with self._changed:
            self._here[segment, index] = checksum
            self._changed.notify_all()

    def _await(self, segment: int, index: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (segment, index) in self._here)
            if self._stopped:
                raise ControlError("stopped, because this rank failed elsewhere")
            return self._here[segment, index]


class _Packer:
    """The bytes of pieces, seen where they lie, or through one buffer where they are small or not plain memory."""

    def __init__(self, memory: Callable[[Slab], torch.Tensor]) -> None:
        self._memory = memory
        self._own: torch.Tensor | None = None

    def views(self, piece: Piece) -> Iterator[memoryview]:
        """The piece's bytes in order; each view is good until the next is asked for."""
        for plain, run in self._runs(piece):
            if plain is not None:
                yield byte_view(plain)
                continue
            buffer, at = self._buffer(run), 0
            for slab in run:
                source = self._memory(slab)
                if not _is_plain(source):
                    source = _like(source)
                    copy_elements(source, self._memory(slab))
                buffer[at : at + slab.nbytes].copy_(as_bytes(source))
                at += slab.nbytes
            yield byte_view(buffer)

    def filled(self, piece: Piece) -> Iterator[memoryview]:
        """Views to be filled with the piece's bytes; when the next is asked for, the last is where it belongs."""
        for plain, run in self._runs(piece):
            if plain is not None:
                yield byte_view(plain)
                continue
            buffer, at = self._buffer(run), 0
            yield byte_view(buffer)
            for slab in run:
                out = self._memory(slab)
                # Memory of its own: in the buffer it may lie at no multiple of its dtype's size.
                target = out if _is_plain(out) else _like(out)
                as_bytes(target).copy_(buffer[at : at + slab.nbytes])
                if target is not out:
                    copy_elements(out, target)
                at += slab.nbytes

    def _runs(self, piece: Piece) -> Iterator[tuple[torch.Tensor | None, Sequence[Slab]]]:
        """Slabs of plain memory, one by one; and all others, as many together as lie side by side."""
        run: list[Slab] = []
        for slab in piece:
            memory = self._memory(slab) if slab.nbytes >= _SMALL else None
            if memory is None or not _is_plain(memory):
                run.append(slab)
                continue
            if run:
                yield None, run
                run = []
            yield memory, [slab]
        if run:
            yield None, run

    def _buffer(self, run: Sequence[Slab]) -> torch.Tensor:
        nbytes = sum(slab.nbytes for slab in run)
        if self._own is None or len(self._own) < nbytes:
            self._own = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return self._own[:nbytes]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _checksum(views: Iterator[memoryview]) -> int:
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()
