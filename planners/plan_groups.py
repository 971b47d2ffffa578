"""Plan ranks with the same table as one group, so that what thousands of replicas hold is handled once.

The boxes of all ranks of a mesh are computed at once, with the arithmetic of ``torch.chunk``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..tensors.mesh_layout import MeshLayout
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .local_plan import OWN_BOXES, WHOLE, PlanTable
from .rank_sets import RankSets


@dataclass(frozen=True, eq=False)
class MeshMembers:
    """Ranks grouped by their coordinates in the mesh dimensions that split: all ranks of a group hold the same box.

    Group ``g`` is ``ranks[starts[g] : starts[g + 1]]``, ascending; one of them has the coordinates ``coordinates[g]``.
    """

    ranks: Int64
    starts: Int64
    coordinates: Int64


def mesh_members(layout: MeshLayout, ranks: Int64, coordinates: Int64) -> MeshMembers:
    """Group ``ranks`` (ascending) by their ``coordinates`` (``[rank, dimension]``) in the mesh."""
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
    if layout.blocks:
        if len(layout.blocks) != len(shape) or any(
            size % blocks for size, blocks in zip(shape, layout.blocks, strict=True)
        ):
            raise PlanError(f"a mesh layout divides a tensor of shape {tuple(shape)} into {layout.blocks} equal blocks")
        shape = [size // blocks for size, blocks in zip(shape, layout.blocks, strict=True)]
    offsets = np.zeros((len(coordinates), len(shape)), np.int64)
    lengths = np.empty((len(coordinates), len(shape)), np.int64)
    for axis, (size, cuts) in enumerate(zip(shape, layout.cuts, strict=True)):
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


@dataclass(frozen=True, eq=False)
class PlanGroup:
    """The ranks with the same table, and what each holds in addition to it.

    Attributes:
        table: What they have in common.
        ranks: The ranks, ascending.
        coordinates: For each layout, their coordinates in its mesh as ``[rank, dimension]``.
        boxes: The own boxes of all these ranks.
        rank: The rank that holds an own box.
        index: The box's number among that rank's own boxes.
    """

    table: PlanTable
    ranks: Int64
    coordinates: list[Int64]
    boxes: BoxTable
    rank: Int64
    index: Int64

    @classmethod
    def of(
        cls,
        table: PlanTable,
        ranks: Sequence[int],
        positions: Sequence[Int64],
        boxes: BoxTable,
        counts: Int64,
    ) -> PlanGroup:
        """Create a group.

        Args:
            table: What the ranks have in common.
            ranks: The ranks, ascending.
            positions: For each rank, its coordinates in the meshes of all layouts, one after the other.
            boxes: The own boxes of all ranks, by rank.
            counts: The number of own boxes of each rank.

        Returns:
            The group.
        """
        dims = [len(layout.shape) for layout in table.layouts]
        table_of_places = np.array(positions, np.int64).reshape(len(ranks), sum(dims))
        members = np.array(ranks, np.int64)
        index = ragged_positions(np.zeros_like(counts), counts)
        coordinates = np.split(table_of_places, np.cumsum(dims)[:-1], axis=1) if dims else []
        return cls(table, members, coordinates, boxes, np.repeat(members, counts), index)


@dataclass(frozen=True, eq=False)
class HeldRows:
    """What all ranks hold: the ranks of set ``member_set[i]`` hold box ``i`` as their shard number ``source[i]``."""

    boxes: BoxTable
    member_set: Int64
    source: Int64


_Part = tuple[Int64, Int64, Int64, Int64, Int64]
"""Columns of ``HeldRows``: tensor, offsets and lengths of the boxes, then set and source."""


def held_rows(
    groups: Sequence[PlanGroup], tensors: TensorTable, rows: Sequence[Int64], own: Sequence[Int64], sets: RankSets
) -> HeldRows:
    """Return what all ranks hold, each distinct box of a group once.

    ``rows`` has, by group, the new row of each row of its table (for shared tensors), ``own`` those of its own tensors
    as ``[own tensor, rank]``.
    """
    empty: Int64 = np.empty(0, np.int64)
    parts: list[_Part] = [(empty, empty, empty, empty, empty)]
    common: dict[Hashable, _Common] = {}
    for group, new, own_new in zip(groups, rows, own, strict=True):
        for part in _common_parts(group, new):
            known = common.setdefault(part.key, part)
            if known is not part:
                known.holders += part.holders
        parts += _own_parts(group, tensors, new, own_new)
    for part in common.values():
        parts += part.held(tensors, sets)
    tensor, offsets, lengths, member_set, source = map(np.concatenate, zip(*parts, strict=True))
    return HeldRows(BoxTable.from_columns(tensors, tensor, offsets, lengths), member_set, source)


@dataclass(eq=False)
class _Common:
    """Tensors of one section that ranks hold in the same way, in the tables of one or several groups.

    Attributes:
        rows: The tensors.
        source: By tensor, the shard that is the first of its boxes on each of the ranks.
        layout: How a mesh splits them; None if the ranks hold them completely.
        holders: For each group, its ranks and their coordinates in the mesh.
    """

    rows: Int64
    source: Int64
    layout: MeshLayout | None
    holders: list[tuple[Int64, Int64]]

    @property
    def key(self) -> Hashable:
        return self.layout, self.rows.tobytes(), self.source.tobytes()

    def held(self, tensors: TensorTable, sets: RankSets) -> Iterator[_Part]:
        """Yield each distinct box with the set of its holders."""
        ranks, coordinates = map(np.concatenate, zip(*self.holders, strict=True))
        order = np.argsort(ranks)
        ranks, coordinates = ranks[order], coordinates[order]
        if self.layout is None:
            everyone = sets.add(ranks, np.array([0, len(ranks)], np.int64))
            yield self.rows, *whole_boxes(tensors, self.rows), np.repeat(everyone, len(self.rows)), self.source
            return
        members = mesh_members(self.layout, ranks, coordinates)
        numbers = np.repeat(sets.add(members.ranks, members.starts), self.layout.boxes)
        box = np.tile(np.arange(self.layout.boxes), len(members.coordinates))
        shapes = tensors.shape[tensors.starts[:-1][self.rows][:, None] + np.arange(len(self.layout.cuts))]
        for shape, which in _by_shape(shapes):
            offsets, lengths = mesh_boxes(self.layout, shape, members.coordinates)
            yield (
                np.repeat(self.rows[which], len(numbers)),
                np.tile(offsets.reshape(-1), len(which)),
                np.tile(lengths.reshape(-1), len(which)),
                np.tile(numbers, len(which)),
                (self.source[which][:, None] + box).reshape(-1),
            )


def _common_parts(group: PlanGroup, rows: Int64) -> Iterator[_Common]:
    """What the ranks of a group share with others, by section: optimizers may differ where models are equal."""
    table = group.table
    counts = table.common_boxes()
    source = np.cumsum(counts) - counts
    none: Int64 = np.empty((len(group.ranks), 0), np.int64)
    kind = np.where(table.own, OWN_BOXES, table.held) * len(table.tensors.sections) + table.tensors.section
    for number, (layout, coordinates) in enumerate(
        zip((None, *table.layouts), (none, *group.coordinates), strict=True)
    ):
        for section in range(len(table.tensors.sections)):
            held = np.flatnonzero(kind == number * len(table.tensors.sections) + section)
            if len(held):
                yield _Common(rows[held], source[held], layout, [(group.ranks, coordinates)])


def _own_parts(group: PlanGroup, tensors: TensorTable, rows: Int64, own: Int64) -> Iterator[_Part]:
    """What each rank of a group holds alone: its own tensors, and boxes that only it can list."""
    table, ranks = group.table, group.ranks
    counts = table.common_boxes()
    source = np.cumsum(counts) - counts
    own_rows = np.flatnonzero(table.own)
    alone = table.held[own_rows] == WHOLE
    names = own[alone].reshape(-1)
    own_source = np.repeat(source[own_rows[alone]], len(ranks))
    yield names, *whole_boxes(tensors, names), np.tile(ranks, int(alone.sum())), own_source
    boxes = group.boxes
    tensor = rows[boxes.tensor]
    if len(own_rows):
        place = np.full(len(table.own), -1, np.int64)
        place[own_rows] = np.arange(len(own_rows))
        is_own = table.own[boxes.tensor]
        at = np.searchsorted(ranks, group.rank[is_own])
        tensor[is_own] = own[place[boxes.tensor[is_own]], at]
    yield tensor, boxes.offsets, boxes.lengths, group.rank, int(counts.sum()) + group.index


def whole_boxes(tensors: TensorTable, rows: Int64) -> tuple[Int64, Int64]:
    """Return offsets and lengths of the boxes that are these tensors, ragged."""
    shape = tensors.shape[ragged_positions(tensors.starts[:-1][rows], tensors.ndim[rows])]
    return np.zeros_like(shape), shape


def _by_shape(shapes: Int64) -> Iterator[tuple[tuple[int, ...], Int64]]:
    """Yield each distinct row of ``[n, ndim]``, and its positions."""
    if len(shapes) == 0:
        return
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    starts = ragged_starts(np.bincount(kind.reshape(-1), minlength=len(kinds)))
    for index, shape in enumerate(kinds.tolist()):
        yield tuple(shape), order[starts[index] : starts[index + 1]]
