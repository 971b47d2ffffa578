"""What the two ways to exchange shared reads have in common: shared boxes, and streams that are verified on arrival.

The reader of a box checks it against the manifest. Its xxh3 in the reader's memory then travels with it, and every
receiver compares it. The manifest's own checksums do not fit: boxes hold elements in the requested dtype and begin
between chunks. TCP's checksum misses one damaged segment in 65,536 and does not cover damage in a host's memory; xxh3
costs less than a tenth of the time on the wire.
"""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch
import xxhash

from ...control.base import Operation
from ...engine.reading.reader import ReadPart, ShardReader
from ...engine.tensor_bytes import as_bytes, box_view, byte_view, copy_elements, is_plain
from ...errors import CorruptionError
from ...planners.request_classes import Stripe
from ...planners.ring_plan import PartBox, Ring, SharedPart
from ...tensors.geometry import Box


class ReadRequest(NamedTuple):
    """One request of a load: read ``box`` of the manifest's tensor ``tensor`` into ``memory``."""

    tensor: int
    box: Box
    memory: torch.Tensor


class SharedBox(NamedTuple):
    """``box`` of the manifest's shard ``shard``, for request ``part``, or for the frame of its ``stripe``."""

    part: int
    shard: int
    box: Box
    stripe: Stripe | None = None


class SharedBoxes:
    """Pieces in storage order, the same on all ranks that share them. ``PartBox.row`` is an index into it."""

    def __init__(self, reader: ShardReader, parts: Sequence[ReadRequest], boxes: Sequence[SharedBox]) -> None:
        self.reader, self._parts = reader, parts
        self._boxes = sorted(boxes, key=self._storage_order)

    def shared_parts(self) -> list[SharedPart]:
        """The boxes as the planner deals them out."""
        manifest = self.reader.manifest
        itemsize = manifest.tensors.itemsize()
        shared = []
        for row, shared_box in enumerate(self._boxes):
            stored_itemsize = int(itemsize[int(manifest.shards.tensor[shared_box.shard])])
            chunk_size = int(manifest.files.chunk_size[int(manifest.shard_file[shared_box.shard])])
            stored_box = manifest.shards.box_of(shared_box.shard)
            memory_itemsize = self._parts[shared_box.part].memory.dtype.itemsize
            shared.append(SharedPart(row, shared_box.box, stored_box, stored_itemsize, memory_itemsize, chunk_size))
        return shared

    def memory(self, part_box: PartBox, box: Box | None = None) -> torch.Tensor:
        """The view of this rank's memory that holds a part box, or ``box``, a part of it."""
        part = self._parts[self._boxes[part_box.row].part]
        return box_view(part.memory, part_box.box if box is None else box, part.box)

    def dtype(self, part_box: PartBox) -> torch.dtype:
        """The dtype of a part box in memory."""
        return self._parts[self._boxes[part_box.row].part].memory.dtype

    def stripe_box(self, part_box: PartBox, number: int) -> Box | None:
        """The part of a part box in stripe ``number``; None if they do not overlap."""
        stripe = self._boxes[part_box.row].stripe
        return part_box.box.intersect(stripe.box_of(number)) if stripe is not None else None

    def read(self, part_boxes: Sequence[PartBox], buffers: Sequence[torch.Tensor]) -> None:
        """Read and verify part boxes, each into its buffer. Thread-safe. Raises as ``ShardReader.read``."""
        shards = [self._boxes[part_box.row].shard for part_box in part_boxes]
        self.reader.read(
            [ReadPart(s, part_box.box, out) for s, part_box, out in zip(shards, part_boxes, buffers, strict=True)]
        )

    def describe(self, part_box: PartBox) -> str:
        """The checkpoint, box and tensor of a part box, for error messages."""
        manifest = self.reader.manifest
        tensor = int(manifest.shards.tensor[self._boxes[part_box.row].shard])
        return f"{self.reader.backend.url}: {part_box.box} of tensor {manifest.tensors.names[tensor]}"

    def _storage_order(self, shared_box: SharedBox) -> tuple[Any, ...]:
        manifest = self.reader.manifest
        part = self._parts[shared_box.part]
        outer = part.box if shared_box.stripe is None else shared_box.stripe.frame
        file, offset = int(manifest.shard_file[shared_box.shard]), int(manifest.shard_offset[shared_box.shard])
        return file, offset, shared_box.box, outer, str(part.memory.dtype)


_HASH = struct.Struct("<Q")
_MIN_ALONE_BYTES = 64 << 10  # a smaller tensor is cheaper to pack with its neighbours than to send alone


class Exchange(ABC):
    """One rank's part in reads that ``shares.ranks`` share: ``shares.ranks[i]`` reads ``shares.segments[i]``.

    The methods raise what reading and the streams raise, and ``CorruptionError``.
    """

    def __init__(self, name: str, shares: Ring, boxes: SharedBoxes, op: Operation, readers: Executor) -> None:
        self._name, self._shares, self._boxes, self._ranks = name, shares, boxes, shares.ranks
        self._index = self._ranks.index(op.rank)
        self._streams, self._readers = op.streams(), readers
        self._timings, self._verify = boxes.reader.timings, boxes.reader.verify
        self._received = [0] * len(self._ranks)  # by sender, so that each counter has one writing thread

    @property
    def bytes_received(self) -> int:
        """Bytes from other ranks so far."""
        return sum(self._received)

    @abstractmethod
    def tasks(self) -> Iterator[Callable[[], None]]:
        """Tasks that wait for each other and for other ranks, so that each needs a thread."""

    def reads(self) -> Iterable[Callable[[], None]]:
        """Tasks for the reading threads, in order. They never wait for other tasks."""
        return ()

    def stop(self) -> None:  # noqa: B027 - most exchanges wait for other ranks only, which the failure report ends
        """End waits for reads that will not be done. Called once, after a failure."""

    def _send(self, to: int, views: Iterable[memoryview], checksum: int | None = None) -> None:
        """Send bytes, and their checksum, which is computed unless it is known, to ``ranks[to]``."""
        hasher = xxhash.xxh3_64()
        for view in views:
            if self._verify and checksum is None:
                hasher.update(view)
            self._streams.send(self._ranks[to], self._name, view)
        if self._verify:
            sent = hasher.intdigest() if checksum is None else checksum
            self._streams.send(self._ranks[to], self._name, _HASH.pack(sent))

    def _receive(self, source: int, reader: int, views: Iterator[memoryview], part_boxes: Sequence[PartBox]) -> int:
        """Fill ``views`` from ``ranks[source]`` with bytes that ``ranks[reader]`` read; returns their checksum."""
        hasher = xxhash.xxh3_64()
        for view in views:
            self._streams.receive(self._ranks[source], self._name, view)
            if self._verify:
                hasher.update(view)
        if not self._verify:
            return 0
        sent = bytearray(_HASH.size)
        self._streams.receive(self._ranks[source], self._name, sent)
        (checksum,) = _HASH.unpack(sent)
        if hasher.intdigest() != checksum:
            more = f" (or one of {len(part_boxes) - 1} more boxes)" if len(part_boxes) > 1 else ""
            raise CorruptionError(
                f"{self._boxes.describe(part_boxes[0])}{more} arrived damaged from rank {self._ranks[source]}; rank "
                f"{self._ranks[reader]} had read and verified it. The stored bytes are intact: load again, with "
                "share_reads='never' if the error persists, and check the memory and network of these hosts"
            )
        return int(checksum)


def checksum_of(views: Iterable[memoryview]) -> int:
    """The xxh3 of the bytes of all views."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()


class Packer:
    """The bytes of tensors: large ones in place, others, and those that are not plain CPU memory, in copies."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def views(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """The bytes in order. Each view is valid until the next one is requested."""
        for run in _runs(tensors):
            plain = [_plain(tensor) for tensor in run]
            if len(run) == 1:
                yield byte_view(plain[0])
                continue
            buffer, at = self._buffer_for(run), 0
            for source in plain:
                buffer[at : at + source.nbytes].copy_(as_bytes(source))
                at += source.nbytes
            yield byte_view(buffer)

    def filled(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """Views to fill with the bytes. Requesting the next view puts the previous one's bytes in place."""
        for run in _runs(tensors):
            # Copies have their own memory: in the buffer, a tensor may not be aligned for its dtype.
            targets = [tensor if tensor.is_cpu and is_plain(tensor) else _empty_like(tensor) for tensor in run]
            if len(run) == 1:
                yield byte_view(targets[0])
            else:
                buffer, at = self._buffer_for(run), 0
                yield byte_view(buffer)
                for target in targets:
                    as_bytes(target).copy_(buffer[at : at + target.nbytes])
                    at += target.nbytes
            for tensor, target in zip(run, targets, strict=True):
                if target is not tensor:
                    copy_elements(tensor, target)

    def _buffer_for(self, run: Sequence[torch.Tensor]) -> torch.Tensor:
        nbytes = sum(tensor.nbytes for tensor in run)
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return self._buffer[:nbytes]


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors one by one, and runs of neighbouring small ones."""
    run: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.nbytes < _MIN_ALONE_BYTES:
            run.append(tensor)
            continue
        if run:
            yield run
            run = []
        yield [tensor]
    if run:
        yield run


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu and is_plain(tensor):
        return tensor
    copied = _empty_like(tensor)
    copy_elements(copied, tensor)
    return copied


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
