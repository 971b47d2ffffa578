"""Ranks whose plans have the same table, planned as one: what thousands of replicas hold is looked at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable
from .mesh_boxes import mesh_boxes, mesh_members
from .rank_sets import RankSets

__all__ = ["HeldRows", "PlanGroup", "group_plans", "held_rows"]


@dataclass(frozen=True, eq=False)
class PlanGroup:
    """The ranks (ascending) of one ``table``, and what each says of itself: by layout its place in the mesh
    (``coordinates``, as ``[rank, dimension]``), and boxes of its own. Row ``i`` of ``boxes`` is the ``index[i]``-th
    such box of rank ``rank[i]``."""

    table: PlanTable
    ranks: Int64
    coordinates: list[Int64]
    boxes: BoxTable
    rank: Int64
    index: Int64

    @classmethod
    def of(
        cls, table: PlanTable, ranks: Sequence[int], places: Sequence[Int64], boxes: BoxTable, counts: Int64
    ) -> PlanGroup:
        """``places`` (the coordinates in the meshes of all layouts, one after the other) are by rank of ``ranks``;
        ``boxes`` are their own, of each as many as ``counts`` says. Raises ``PlanError`` for places in other meshes
        than the table's."""
        dims = [len(layout.shape) for layout in table.layouts]
        if any(len(place) != sum(dims) for place in places):
            raise PlanError(f"ranks {ranks[:8]} do not tell their places in {len(dims)} meshes")
        table_of_places = np.array(places, np.int64).reshape(len(ranks), sum(dims))
        members = np.array(ranks, np.int64)
        index = ragged_positions(np.zeros_like(counts), counts)
        coordinates = np.split(table_of_places, np.cumsum(dims)[:-1], axis=1) if dims else []
        return cls(table, members, coordinates, boxes, np.repeat(members, counts), index)


def group_plans(plans: Sequence[LocalPlan]) -> list[PlanGroup]:
    """Group whole plans, which are by rank."""
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
        places = [plans[rank].places() for rank in ranks]
        groups.append(PlanGroup.of(table, ranks, places, joined, np.array([len(one) for one in boxes], np.int64)))
    return groups


@dataclass(frozen=True, eq=False)
class HeldRows:
    """What is held: row ``i`` of ``boxes`` by each rank of set ``member_set[i]``, whose ``source[i]``-th shard it
    is."""

    boxes: BoxTable
    member_set: Int64
    source: Int64


@dataclass(frozen=True, eq=False)
class _Part:
    tensor: Int64
    offsets: Int64
    lengths: Int64
    member_set: Int64
    source: Int64


def held_rows(
    groups: Sequence[PlanGroup], tensors: TensorTable, rows: Sequence[Int64], own: Sequence[Int64], sets: RankSets
) -> HeldRows:
    """Everything that all ranks hold, each distinct box of a group once. ``rows`` are by group the new row of each row
    of its table (for shared tensors), ``own`` those of its own tensors by ``[own tensor, rank]``."""
    parts = [part for group, new, ours in zip(groups, rows, own) for part in _parts(group, tensors, new, ours, sets)]
    empty: Int64 = np.empty(0, np.int64)
    columns = [
        np.concatenate([empty, *(getattr(part, name) for part in parts)])
        for name in ("tensor", "offsets", "lengths", "member_set", "source")
    ]
    return HeldRows(BoxTable.from_columns(tensors, *columns[:3]), columns[3], columns[4])


def _parts(group: PlanGroup, tensors: TensorTable, rows: Int64, own: Int64, sets: RankSets) -> Iterator[_Part]:
    table, ranks = group.table, group.ranks
    source = np.cumsum(table.held != OWN_BOXES) - 1
    everyone = sets.add(ranks, np.array([0, len(ranks)], np.int64))
    whole = np.flatnonzero((table.held == WHOLE) & ~table.own)
    yield _whole(tensors, rows[whole], np.repeat(everyone, len(whole)), source[whole])
    mine = np.flatnonzero(table.own)
    alone = table.held[mine] == WHOLE
    yield _whole(
        tensors,
        own[alone].reshape(-1),
        np.tile(ranks, int(alone.sum())),
        np.repeat(source[mine[alone]], len(ranks)),
    )
    for number, (layout, coordinates) in enumerate(zip(table.layouts, group.coordinates), 1):
        cut = np.flatnonzero((table.held == number) & ~table.own)
        members = mesh_members(layout, ranks, coordinates)
        numbers = sets.add(members.ranks, members.starts)
        ndim = len(layout.cuts)
        shapes = table.tensors.shape[table.tensors.starts[:-1][cut][:, None] + np.arange(ndim)]
        for shape, which in _by_shape(shapes):
            offsets, lengths = mesh_boxes(layout, shape, members.coordinates)
            many = cut[which]
            yield _Part(
                np.repeat(rows[many], len(numbers)),
                np.tile(offsets.reshape(-1), len(many)),
                np.tile(lengths.reshape(-1), len(many)),
                np.tile(numbers, len(many)),
                np.repeat(source[many], len(numbers)),
            )
    boxes = group.boxes
    tensor = rows[boxes.tensor]
    if len(mine):
        place = np.full(len(table.own), -1, np.int64)
        place[mine] = np.arange(len(mine))
        theirs = table.own[boxes.tensor]
        at = np.searchsorted(ranks, group.rank[theirs])
        tensor[theirs] = own[place[boxes.tensor[theirs]], at]
    common = int((table.held != OWN_BOXES).sum())
    yield _Part(tensor, boxes.offsets, boxes.lengths, group.rank, common + group.index)


def _whole(tensors: TensorTable, rows: Int64, member_set: Int64, source: Int64) -> _Part:
    shape = tensors.shape[ragged_positions(tensors.starts[:-1][rows], tensors.ndim[rows])]
    return _Part(rows, np.zeros_like(shape), shape, member_set, source)


def _by_shape(shapes: Int64) -> Iterator[tuple[tuple[int, ...], Int64]]:
    """Each distinct row of ``[n, ndim]``, and where it stands."""
    if len(shapes) == 0:
        return
    kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    starts = ragged_starts(np.bincount(kind.reshape(-1), minlength=len(kinds)))
    for index, shape in enumerate(kinds.tolist()):
        yield tuple(shape), order[starts[index] : starts[index + 1]]
