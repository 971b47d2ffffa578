"""The pieces of stored boxes that several ranks share, and the memory of one rank that they are loaded into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...engine.reading.reader import Reader, ReadPart
from ...engine.tensor_bytes import box_view
from ...planners import PartBox, SharedPart, Stripe
from ...tensors.geometry import Box

__all__ = ["Part", "StoredPiece", "StoredPieces"]


class Part(NamedTuple):
    """One request of a load: read ``box`` of the manifest's tensor ``tensor`` into ``memory``."""

    tensor: int
    box: Box
    memory: torch.Tensor


class StoredPiece(NamedTuple):
    """``box`` of the manifest's shard ``shard``, for request ``part``, or for the frame of its ``stripe``."""

    part: int
    shard: int
    box: Box
    stripe: Stripe | None = None


class StoredPieces:
    """Pieces in storage order, the same on all ranks that share them. ``PartBox.row`` is an index into it."""

    def __init__(self, reader: Reader, parts: Sequence[Part], pieces: Sequence[StoredPiece]) -> None:
        self.reader, self._parts = reader, parts
        self._pieces = sorted(pieces, key=self._storage_order)

    def shared_parts(self) -> list[SharedPart]:
        """The pieces as the planner deals them out."""
        manifest = self.reader.manifest
        itemsize = manifest.tensors.itemsize()
        shared = []
        for row, piece in enumerate(self._pieces):
            stored_itemsize = int(itemsize[int(manifest.shards.tensor[piece.shard])])
            chunk_size = int(manifest.files.chunk_size[int(manifest.shard_file[piece.shard])])
            stored_box = manifest.shards.box_of(piece.shard)
            memory_itemsize = self._parts[piece.part].memory.dtype.itemsize
            shared.append(SharedPart(row, piece.box, stored_box, stored_itemsize, memory_itemsize, chunk_size))
        return shared

    def memory(self, part_box: PartBox, box: Box | None = None) -> torch.Tensor:
        """The view of this rank's memory that holds a part box, or ``box``, a part of it."""
        part = self._parts[self._pieces[part_box.row].part]
        return box_view(part.memory, part_box.box if box is None else box, part.box)

    def dtype(self, part_box: PartBox) -> torch.dtype:
        """The dtype of a part box in memory."""
        return self._parts[self._pieces[part_box.row].part].memory.dtype

    def stripe_box(self, part_box: PartBox, number: int) -> Box | None:
        """The part of a part box in stripe ``number``; None if they do not overlap."""
        stripe = self._pieces[part_box.row].stripe
        return part_box.box.intersect(stripe.box_of(number)) if stripe is not None else None

    def read(self, part_boxes: Sequence[PartBox], buffers: Sequence[torch.Tensor]) -> None:
        """Read and verify part boxes, each into its buffer. Thread-safe. Raises as ``Reader.read``."""
        shards = [self._pieces[part_box.row].shard for part_box in part_boxes]
        self.reader.read([ReadPart(s, part_box.box, out) for s, part_box, out in zip(shards, part_boxes, buffers)])

    def describe(self, part_box: PartBox) -> str:
        """The checkpoint, box and tensor of a part box, for error messages."""
        manifest = self.reader.manifest
        tensor = int(manifest.shards.tensor[self._pieces[part_box.row].shard])
        return f"{self.reader.backend.url}: {part_box.box} of tensor {manifest.tensors.names[tensor]}"

    def _storage_order(self, piece: StoredPiece) -> tuple[Any, ...]:
        manifest = self.reader.manifest
        part = self._parts[piece.part]
        outer = part.box if piece.stripe is None else piece.stripe.frame
        file, offset = int(manifest.shard_file[piece.shard]), int(manifest.shard_offset[piece.shard])
        return file, offset, piece.box, outer, str(part.memory.dtype)
