"""From classes of stripes to what ranks scatter among each other (see ``planners.share_classes``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .checkpoint import cut
from .engine.reading.reader import Reader, ReadPart
from .engine.reading.scatter_exchange import ScatterJob
from .errors import PlanError
from .geometry import Box
from .planners import SharedPart, Slab, Stripe, Want, WantClass, plan_load, plan_ring
from .tables import BoxTable

__all__ = ["plan_scatter"]

# Four are read at a time, two times over, into memory of the reader's own; eight times as much at most, where hardly
# any row begins with a chunk.
_PIECE = 1 << 20


def plan_scatter(
    reader: Reader,
    ranks: Sequence[int],
    classes: Sequence[WantClass],
    wants: Sequence[Want],
    memory: Sequence[torch.Tensor],
) -> ScatterJob | None:
    """How ``ranks``, in the order of their stripes, share the frames of these classes; ``memory`` is by want. None
    where the frames are not all stored: on all of the ranks, as it is on one."""
    frames = [frame for one in classes for frame in zip(one.wants, one.stripes)]
    boxes = BoxTable.build([(wants[want].tensor, stripe.frame) for want, stripe in frames])
    manifest = reader.manifest
    try:
        plan = plan_load(manifest.tensors, manifest.shards, boxes)
    except PlanError:
        return None
    return _Frames(reader, frames, list(plan.pieces()), wants, memory).job(ranks, classes[0].offer.digest.hex())


class _Frames:
    """Parts of stored boxes that are parts of frames; their numbers are the rows of slabs."""

    def __init__(
        self,
        reader: Reader,
        frames: Sequence[tuple[int, Stripe]],
        pieces: list[tuple[int, int, Box]],
        wants: Sequence[Want],
        memory: Sequence[torch.Tensor],
    ) -> None:
        self._reader, self._frames, self._wants, self._memory = reader, frames, wants, memory
        self._pieces = sorted(pieces, key=self._place)

    def job(self, ranks: Sequence[int], name: str) -> ScatterJob:
        shares = plan_ring(ranks, [self._shared(row) for row in range(len(self._pieces))], piece=_PIECE)
        return ScatterJob(f"scatter/{name}", shares, self._part, self._view, self._dtype, self._read, self._describe)

    def _place(self, piece: tuple[int, int, Box]) -> tuple[Any, ...]:
        """Storage order, the same on all ranks."""
        frame, stored, box = piece
        manifest = self._reader.manifest
        return int(manifest.shard_file[stored]), int(manifest.shard_offset[stored]), box, self._frames[frame][1].frame

    def _shared(self, row: int) -> SharedPart:
        frame, stored, box = self._pieces[row]
        manifest = self._reader.manifest
        size = manifest.tensors.meta_of(int(manifest.shards.tensor[stored])).dtype.itemsize
        chunk = int(manifest.files.chunk_size[int(manifest.shard_file[stored])])
        want, _ = self._frames[frame]
        return SharedPart(row, box, manifest.shards.box_of(stored), size, self._memory[want].dtype.itemsize, chunk)

    def _stripe(self, slab: Slab) -> tuple[int, Stripe]:
        return self._frames[self._pieces[slab.row][0]]

    def _part(self, slab: Slab, index: int) -> Box | None:
        _, stripe = self._stripe(slab)
        return slab.box.intersect(stripe.box_of(index))

    def _view(self, slab: Slab, box: Box) -> torch.Tensor:
        want, _ = self._stripe(slab)
        return cut(self._memory[want], box, self._wants[want].box)

    def _dtype(self, slab: Slab) -> torch.dtype:
        return self._memory[self._stripe(slab)[0]].dtype

    def _read(self, slabs: Sequence[tuple[Slab, torch.Tensor]]) -> None:
        self._reader.read([ReadPart(self._pieces[slab.row][1], slab.box, frame) for slab, frame in slabs])

    def _describe(self, slab: Slab) -> str:
        manifest = self._reader.manifest
        tensor = int(manifest.shards.tensor[self._pieces[slab.row][1]])
        return f"{self._reader.backend.url}: {slab.box} of tensor {manifest.tensors.names[tensor]}"
