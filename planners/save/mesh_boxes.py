"""Compute the box that each rank of a mesh holds, with the arithmetic of ``torch.chunk``, for all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PlanError
from ...tensors.mesh_layout import MeshLayout
from ...tensors.tables import Int64, ragged_starts

__all__ = ["MeshMembers", "mesh_boxes", "mesh_members"]


@dataclass(frozen=True, eq=False)
class MeshMembers:
    """Ranks grouped by their coordinates in the mesh dimensions that split: all ranks of a group hold the same box.

    Group ``g`` is ``ranks[starts[g] : starts[g + 1]]``, ascending; one of them has the coordinates ``coordinates[g]``.
    """

    ranks: Int64
    starts: Int64
    coordinates: Int64


def mesh_members(layout: MeshLayout, ranks: Int64, coordinates: Int64) -> MeshMembers:
    """Group ``ranks`` (ascending) by their ``coordinates`` (``[rank, dimension]``) in the mesh.

    Raises ``PlanError`` for a coordinate outside the mesh.
    """
    if ((coordinates < 0) | (coordinates >= np.array(layout.shape, np.int64))).any():
        raise PlanError(f"the coordinates of a rank are outside its mesh of shape {layout.shape}")
    where = np.zeros(len(ranks), np.int64)
    for dim in sorted(dim for axis in layout.cuts for dim in axis):
        where = where * layout.shape[dim] + coordinates[:, dim]
    order = np.argsort(where, kind="stable")
    begins = np.flatnonzero(np.diff(where[order], prepend=-1))
    counts = np.diff(np.append(begins, len(ranks)))
    return MeshMembers(ranks[order], ragged_starts(counts), coordinates[order[begins]])


def mesh_boxes(layout: MeshLayout, shape: Sequence[int], coordinates: Int64) -> tuple[Int64, Int64]:
    """Compute the boxes of a tensor that are held at some coordinates of a mesh.

    Args:
        layout: How the mesh splits the tensor.
        shape: The tensor's shape.
        coordinates: Mesh coordinates, as ``[n, mesh dimension]``.

    Returns:
        Offsets and lengths, as ``[n * layout.boxes, ndim]``, all boxes of one coordinate after those of another, in
        row-major order of the blocks. A length is 0 if nothing is held there.

    Raises:
        PlanError: The layout has another number of dimensions than the tensor, or the tensor is not divisible into
            its blocks.
    """
    if len(layout.cuts) != len(shape):
        raise PlanError(f"a mesh layout has {len(layout.cuts)} dimensions, but its tensor has shape {tuple(shape)}")
    if any(size % blocks for size, blocks in zip(shape, layout.blocks)):
        raise PlanError(f"a mesh layout divides a tensor of shape {tuple(shape)} into {layout.blocks} equal blocks")
    if layout.blocks:
        shape = [size // blocks for size, blocks in zip(shape, layout.blocks)]
    offsets = np.zeros((len(coordinates), len(shape)), np.int64)
    lengths = np.empty((len(coordinates), len(shape)), np.int64)
    for axis, (size, cuts) in enumerate(zip(shape, layout.cuts)):
        held: Int64 = np.full(len(coordinates), size, np.int64)
        for dim in cuts:
            each = -(-held // layout.shape[dim])
            first = np.minimum(coordinates[:, dim] * each, held)
            offsets[:, axis] += first
            held = np.minimum(first + each, held) - first
        lengths[:, axis] = held
    if layout.blocks:
        corners = np.indices(layout.blocks).reshape(len(shape), -1).T * np.array(shape, np.int64)
        offsets = (offsets[:, None] + corners).reshape(-1, len(shape))
        lengths = np.repeat(lengths, len(corners), axis=0)
    return offsets, lengths
