"""Plan ranks with the same table as one group, so that what thousands of replicas hold is handled once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable, pack_places, unpack_places
from .mesh_boxes import MeshMembers, mesh_boxes, mesh_members
from .rank_sets import RankSets

__all__ = ["HeldRows", "OwnBoxes", "PlanGroup", "group_plans", "held_rows", "whole_boxes"]


@dataclass(frozen=True, eq=False)
class PlanGroup:
    """The ranks with the same table, and where what it describes begins on each of them.

    Attributes:
        table: What they have in common. A rank may have several tables, one after the other.
        ranks: The ranks, ascending.
        coordinates: For each layout, their coordinates in its mesh as ``[rank, dimension]``.
        first_shard: By rank, the row of the table's first common box among the rank's shards.
        first_value: By rank, the row of the table's first value among the rank's values.
    """

    table: PlanTable
    ranks: Int64
    coordinates: list[Int64]
    first_shard: Int64
    first_value: Int64

    @classmethod
    def of(
        cls,
        table: PlanTable,
        ranks: Sequence[int],
        places: Sequence[bytes],
        first_shard: Sequence[int] | None = None,
        first_value: Sequence[int] | None = None,
    ) -> PlanGroup:
        """Create a group.

        Args:
            table: What the ranks have in common.
            ranks: The ranks, ascending.
            places: For each rank, what ``pack_places`` has returned.
            first_shard: By rank, the row of the table's first common box among the rank's shards. 0 if None.
            first_value: By rank, the row of the table's first value among the rank's values. 0 if None.

        Returns:
            The group.

        Raises:
            PlanError: The coordinates do not match the table's meshes.
        """
        dims = [len(layout.shape) for layout in table.layouts]
        coordinates = unpack_places(places, sum(dims))
        nowhere = np.zeros(len(ranks), np.int64)
        return cls(
            table,
            np.array(ranks, np.int64),
            np.split(coordinates, np.cumsum(dims)[:-1], axis=1) if dims else [],
            nowhere if first_shard is None else np.array(first_shard, np.int64),
            nowhere if first_value is None else np.array(first_value, np.int64),
        )


@dataclass(frozen=True, eq=False)
class OwnBoxes:
    """Boxes that only their holders can list.

    Attributes:
        boxes: The boxes, of tensors by their row in the tables of all groups, one after the other.
        rank: By row of ``boxes``, the rank that holds it.
        source: By row of ``boxes``, its row among that rank's shards.
    """

    boxes: BoxTable
    rank: Int64
    source: Int64

    @classmethod
    def of(cls, boxes: BoxTable, counts: Int64, common: Int64) -> OwnBoxes:
        """Attribute boxes to ranks.

        Args:
            boxes: The boxes, by rank.
            counts: The number of boxes of each rank.
            common: The number of each rank's other boxes, which come first among its shards.

        Returns:
            The boxes with their ranks and rows.
        """
        return cls(boxes, np.repeat(np.arange(len(counts)), counts), ragged_positions(common, counts))


def group_plans(plans: Sequence[LocalPlan]) -> tuple[list[PlanGroup], OwnBoxes]:
    """Group the plans of all ranks, which are by rank."""
    tables = [plan.table() for plan in plans]
    keys: dict[bytes, list[int]] = {}
    for rank, table in enumerate(tables):
        keys.setdefault(table.to_bytes() if len(plans) > 1 else b"", []).append(rank)
    first = np.zeros(len(plans), np.int64)
    groups = []
    at = 0
    for ranks in keys.values():
        table = tables[ranks[0]]
        groups.append(PlanGroup.of(table, ranks, [pack_places(plans[rank].flat_coordinates()) for rank in ranks]))
        first[ranks] = at
        at += len(table.tensors)
    boxes = [plan.own_boxes() for plan in plans]
    counts = np.array(list(map(len, boxes)), np.int64)
    some = [BoxTable.build([]), *boxes]
    joined = BoxTable(
        np.concatenate([one.tensor for one in some]) + np.repeat(first, counts),
        np.concatenate([one.offsets for one in some]),
        np.concatenate([one.lengths for one in some]),
        ragged_starts(np.concatenate([np.diff(one.starts) for one in some])),
    )
    return groups, OwnBoxes.of(joined, counts, np.array([len(plan.shards) for plan in plans], np.int64) - counts)


@dataclass(frozen=True, eq=False)
class HeldRows:
    """What all ranks hold: the ranks of set ``member_set[i]`` hold box ``i`` as their shard number ``source[i]``."""

    boxes: BoxTable
    member_set: Int64
    source: Int64


_Part = tuple[Int64, Int64, Int64, Int64, Int64]
"""Columns of ``HeldRows``: tensor, offsets and lengths of the boxes, then set and source."""


def held_rows(
    groups: Sequence[PlanGroup],
    listed: OwnBoxes,
    tensors: TensorTable,
    rows: Sequence[Int64],
    own: Sequence[Int64],
    sets: RankSets,
) -> HeldRows:
    """Return what all ranks hold, each distinct box of a group once.

    ``rows`` has, by group, the new row of each row of its table (for shared tensors), ``own`` those of its own tensors
    as ``[own tensor, rank]``.
    """
    tensor = _rows_of_listed(groups, listed, rows, own)
    parts: list[_Part] = [(tensor, listed.boxes.offsets, listed.boxes.lengths, listed.rank, listed.source)]
    meshes = _Meshes(tensors, sets)
    whole: list[_Whole] = []
    for group, new, own_new in zip(groups, rows, own):
        table, held = group.table, group.table.held
        counts = table.common_boxes()
        source = np.cumsum(counts) - counts
        if len(own_new):
            own_rows = np.flatnonzero(table.own)
            alone = own_rows[held[own_rows] == WHOLE]
            names = own_new[held[own_rows] == WHOLE].reshape(-1)
            its_row = (source[alone][:, None] + group.first_shard).reshape(-1)
            parts.append((names, *whole_boxes(tensors, names), np.tile(group.ranks, len(alone)), its_row))
            held = np.where(table.own, OWN_BOXES, held)
        if int(held.max(initial=OWN_BOXES)) == OWN_BOXES:
            continue
        for first, members in _by_first_shard(group):
            which = (held == WHOLE).nonzero()[0]
            whole.append((group.ranks[members], new[which], first + source[which]))
            for number in range(1, len(table.layouts) + 1):
                which = (held == number).nonzero()[0]
                parts.append(meshes.part(group, number, members, new[which], first + source[which]))
    parts.append(_whole_part(whole, tensors, sets))
    tensor, offsets, lengths, member_set, source = map(np.concatenate, zip(*parts))
    return HeldRows(BoxTable.from_columns(tensors, tensor, offsets, lengths), member_set, source)


def _by_first_shard(group: PlanGroup) -> Iterator[tuple[int, Int64 | slice]]:
    """Yield the members of a group on which the table's common boxes begin at the same row."""
    first = group.first_shard
    if (first == first[0]).all():
        yield int(first[0]), slice(None)
        return
    for value in np.unique(first).tolist():
        yield value, np.flatnonzero(first == value)


def _rows_of_listed(
    groups: Sequence[PlanGroup], listed: OwnBoxes, rows: Sequence[Int64], own: Sequence[Int64]
) -> Int64:
    """Return the new row of the tensor of each listed box."""
    row = listed.boxes.tensor
    tensor = np.concatenate([np.empty(0, np.int64), *rows])[row]
    boxes = np.flatnonzero(tensor < 0)
    if len(boxes):
        starts = ragged_starts(np.array(list(map(len, rows)), np.int64))
        number = np.searchsorted(starts, row[boxes], side="right") - 1
        for which in np.unique(number).tolist():
            group, some = groups[which], boxes[number == which]
            place = np.searchsorted(np.flatnonzero(group.table.own), row[some] - starts[which])
            tensor[some] = own[which][place, np.searchsorted(group.ranks, listed.rank[some])]
    return tensor


_Whole = tuple[Int64, Int64, Int64]
"""Ranks, the tensors that each of them holds completely, and their rows among its shards."""


def _whole_part(whole: Sequence[_Whole], tensors: TensorTable, sets: RankSets) -> _Part:
    empty: Int64 = np.empty(0, np.int64)
    ranks, rows, source = map(np.concatenate, zip((empty, empty, empty), *whole))
    members, counts = np.array([(len(one[0]), len(one[1])) for one in whole], np.int64).reshape(-1, 2).T
    return rows, *whole_boxes(tensors, rows), np.repeat(sets.add(ranks, ragged_starts(members)), counts), source


class _Meshes:
    """The boxes of tensors that meshes split, and their holders. Many groups have meshes and shapes in common."""

    def __init__(self, tensors: TensorTable, sets: RankSets) -> None:
        self._tensors, self._sets = tensors, sets
        self._holders: dict[Hashable, tuple[MeshMembers, Int64]] = {}
        self._boxes: dict[Hashable, tuple[Int64, Int64]] = {}

    def part(self, group: PlanGroup, number: int, members: Int64 | slice, rows: Int64, source: Int64) -> _Part:
        """What the ranks ``members`` of a group hold of tensors that a layout splits."""
        if not len(rows):
            return rows, rows, rows, rows, rows
        layout, ranks = group.table.layouts[number - 1], group.ranks[members]
        coordinates = group.coordinates[number - 1][members]
        cutting = frozenset(dim for axis in layout.cuts for dim in axis)
        key = layout.shape, cutting, ranks.tobytes(), coordinates.tobytes()
        if key not in self._holders:
            places = mesh_members(layout, ranks, coordinates)
            self._holders[key] = places, self._sets.add(places.ranks, places.starts)
        places, holders = self._holders[key]
        numbers = np.repeat(holders, layout.boxes)
        box = np.tile(np.arange(layout.boxes), len(holders))
        tensors, place_key = self._tensors, places.coordinates.tobytes()
        shapes = tensors.shape[tensors.starts[rows][:, None] + np.arange(len(layout.cuts))].tolist()
        kinds: dict[tuple[int, ...], int] = {}
        kind = [kinds.setdefault(tuple(shape), len(kinds)) for shape in shapes]
        for shape in kinds:
            if (layout, shape, place_key) not in self._boxes:
                self._boxes[layout, shape, place_key] = mesh_boxes(layout, shape, places.coordinates)
        boxes = np.array([self._boxes[layout, shape, place_key] for shape in kinds])[kind]
        offsets, lengths = boxes[:, 0].reshape(-1), boxes[:, 1].reshape(-1)
        return (
            np.repeat(rows, len(numbers)),
            offsets,
            lengths,
            np.tile(numbers, len(rows)),
            (source[:, None] + box).reshape(-1),
        )


def whole_boxes(tensors: TensorTable, rows: Int64) -> tuple[Int64, Int64]:
    """Return offsets and lengths of the boxes that are these tensors, ragged."""
    shape = tensors.shape[ragged_positions(tensors.starts[:-1][rows], tensors.ndim[rows])]
    return np.zeros_like(shape), shape
