"""What each rank of a mesh holds of a tensor: the arithmetic of ``torch.chunk``, for all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..mesh_layout import MeshLayout
from ..tables import Int64, ragged_starts

__all__ = ["MeshMembers", "mesh_boxes", "mesh_members"]


@dataclass(frozen=True, eq=False)
class MeshMembers:
    """Ranks grouped by their place along the dimensions of a mesh that cut: all of a group hold the same box.

    Group ``g`` is ``ranks[starts[g] : starts[g + 1]]``, ascending, and one of them stands at ``coordinates[g]``.
    """

    ranks: Int64
    starts: Int64
    coordinates: Int64


def mesh_members(layout: MeshLayout, ranks: Int64, coordinates: Int64) -> MeshMembers:
    """Group ``ranks`` (ascending), which stand at ``coordinates`` (``[rank, dimension]``) of the mesh.

    Raises ``PlanError`` for a coordinate outside the mesh.
    """
    if ((coordinates < 0) | (coordinates >= np.array(layout.shape, np.int64))).any():
        raise PlanError(f"a rank stands outside its mesh of {layout.shape}")
    where = np.zeros(len(ranks), np.int64)
    for dim in sorted(dim for axis in layout.cuts for dim in axis):
        where = where * layout.shape[dim] + coordinates[:, dim]
    order = np.argsort(where, kind="stable")
    begins = np.flatnonzero(np.diff(where[order], prepend=-1))
    counts = np.diff(np.append(begins, len(ranks)))
    return MeshMembers(ranks[order], ragged_starts(counts), coordinates[order[begins]])


def mesh_boxes(layout: MeshLayout, shape: Sequence[int], coordinates: Int64) -> tuple[Int64, Int64]:
    """Offsets and lengths, as ``[n, ndim]``, of what is held at each row of ``coordinates`` of a tensor of this shape;
    some length is 0 where that is nothing. Raises ``PlanError`` for a tensor of other dimensions than the layout's."""
    if len(layout.cuts) != len(shape):
        raise PlanError(f"a mesh layout of {len(layout.cuts)} dimensions for a tensor of shape {tuple(shape)}")
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
    return offsets, lengths
