"""Plan ranks with the same table as one group, so that what thousands of replicas hold is handled once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PlanError
from ...tensors.mesh_layout import MeshLayout
from ...tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable
from .mesh_boxes import mesh_boxes, mesh_members
from .rank_sets import RankSets

__all__ = ["HeldRows", "PlanGroup", "group_plans", "held_rows", "whole_boxes"]


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

        Raises:
            PlanError: The coordinates do not match the table's meshes.
        """
        dims = [len(layout.shape) for layout in table.layouts]
        if any(len(place) != sum(dims) for place in positions):
            raise PlanError(f"ranks {ranks[:8]} did not send their coordinates in {len(dims)} meshes")
        table_of_places = np.array(positions, np.int64).reshape(len(ranks), sum(dims))
        members = np.array(ranks, np.int64)
        index = ragged_positions(np.zeros_like(counts), counts)
        coordinates = np.split(table_of_places, np.cumsum(dims)[:-1], axis=1) if dims else []
        return cls(table, members, coordinates, boxes, np.repeat(members, counts), index)


def group_plans(plans: Sequence[LocalPlan]) -> list[PlanGroup]:
    """Group the plans of all ranks, which are by rank."""
    tables = [plan.table() for plan in plans]
    keys: dict[bytes, list[int]] = {}
    for rank, table in enumerate(tables):
        keys.setdefault(table.to_bytes() if len(plans) > 1 else b"", []).append(rank)
    groups = []
    for ranks in keys.values():
        table, boxes = tables[ranks[0]], [plans[rank].own_boxes() for rank in ranks]
        joined = BoxTable.from_columns(
            table.tensors,
            np.concatenate([one.tensor for one in boxes]),
            np.concatenate([one.offsets for one in boxes]),
            np.concatenate([one.lengths for one in boxes]),
        )
        positions = [plans[rank].flat_coordinates() for rank in ranks]
        groups.append(PlanGroup.of(table, ranks, positions, joined, np.array([len(one) for one in boxes], np.int64)))
    return groups


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
    for group, new, own_new in zip(groups, rows, own):
        for part in _common_parts(group, new):
            known = common.setdefault(part.key, part)
            if known is not part:
                known.holders += part.holders
        parts += _own_parts(group, tensors, new, own_new)
    for part in common.values():
        parts += part.held(tensors, sets)
    tensor, offsets, lengths, member_set, source = map(np.concatenate, zip(*parts))
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
        ranks, coordinates = map(np.concatenate, zip(*self.holders))
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
    for number, (layout, coordinates) in enumerate(zip((None, *table.layouts), (none, *group.coordinates))):
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
