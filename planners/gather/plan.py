"""Which tensors are stored whole although ranks hold them in parts, who writes each, and who sends what to whom.

A save plan says which rank contributes which box. Here the boxes of a tensor become fragments that travel to one owner,
which writes the tensor as one. Pure and deterministic, like the plan it starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Literal, get_args

import numpy as np

from ..errors import PlanError
from ..safetensors_file import shard_name
from ..tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .assignment import Assignment
from .gather_share import LEAST_PIECE, PIECE_SIZE, GatherShare, item_places
from .save_plan import SavePlan, lay_out_files, rows_by_rank
from .wire import Bool

__all__ = ["LAYOUTS", "GatherPlan", "Layout", "plan_gather"]

Layout = Literal["shards", "merged", "whole"]
"""What is stored of a tensor that ranks hold in parts: the parts (irregular ones decomposed into boxes); the whole
where the parts are no regular grid; the whole."""

LAYOUTS: tuple[str, ...] = get_args(Layout)

# So many of a tensor's holders, those with most of it, are considered as its owner before all other ranks.
_CANDIDATES = 8


@dataclass(eq=False)
class GatherPlan:
    """A save plan in which tensors were made whole, and the fragments they are made of.

    ``stored`` is the plan of what will be on storage; its ``source`` is -1 for a tensor made whole. The other columns
    are by fragment: what was a shard to be written is one, by tensor, then offsets. ``target`` is the row of
    ``stored.shards`` that it becomes part of, ``boxes`` where it lies in it, in the target's own coordinates;
    ``holder`` is the rank that stages it, ``row`` its row in that rank's ``LocalPlan.shards``.
    """

    stored: SavePlan
    target: Int64
    boxes: BoxTable
    holder: Int64
    row: Int64
    piece_size: int

    @cached_property
    def gathered(self) -> Bool:
        """By file of ``stored``: whether any of it is made of fragments. The others are written as ever."""
        found = np.zeros(len(self.stored.files), np.bool_)
        found[self.stored.file[self.stored.source < 0]] = True
        return found

    @property
    def bytes_sent(self) -> int:
        """What all ranks together send to others."""
        travels = self.stored.owner[self.target] != self.holder
        return int(self.boxes.nbytes(self.stored.tensors)[travels].sum())

    def assignment(self, rank: int) -> Assignment:
        """What ``rank`` writes on its own: values, and files of which nothing is gathered."""
        return self.stored.assignment(rank, self._files_alone(rank))

    def assignment_bytes(self, rank: int) -> bytes:
        """``assignment`` for ``Assignment.from_bytes``."""
        return self.stored.assignment_bytes(rank, self._files_alone(rank))

    def share(self, rank: int) -> GatherShare:
        """What ``rank`` sends, gathers and writes beside that."""
        stored = self.stored
        sent = self._held(rank)
        sent = sent[stored.owner[self.target[sent]] != rank]
        to, place = stored.owner[self.target[sent]], self._places[self.target[sent]]
        order = np.lexsort((sent, place, to))
        targets = [self._targets_of(index) for index in self.stored.file_rows(rank) if self.gathered[index]]
        rows = np.concatenate([np.empty(0, np.int64), *targets])
        inward = self._fragments_of(rows)
        item = np.repeat(np.arange(len(rows)), self._fragment_starts[rows + 1] - self._fragment_starts[rows])
        parts = self.boxes.take(inward)
        return GatherShare(
            self.piece_size,
            self.row[sent[order]],
            to[order],
            place[order],
            self._items(rows),
            BoxTable(item, parts.offsets, parts.lengths, parts.starts),
            self.holder[inward],
            np.where(self.holder[inward] == rank, self.row[inward], -1),
        )

    def _items(self, rows: Int64) -> TensorTable:
        """Rows of ``stored.shards`` as tensors in their own right, named as in the file."""
        tensors, shards = self.stored.tensors, self.stored.shards.take(rows)
        file = self.stored.file[rows]
        sections = [self.stored.files[index].section for index in np.unique(file).tolist()]
        names = []
        for index, tensor in enumerate(shards.tensor.tolist()):
            box = shards.box_of(index)
            whole = box.lengths == tensors.shape_of(tensor)
            names.append(f"{tensors.section_of(tensor)}.{shard_name(tensors.fqn_of(tensor), box, whole)}")
        section = np.unique(file, return_inverse=True)[1].astype(np.int64)
        return TensorTable(
            names, sections, section, tensors.dtype[shards.tensor], tensors.ndim[shards.tensor], shards.lengths
        )

    def _files_alone(self, rank: int) -> list[int]:
        return [row for row in self.stored.file_rows(rank) if not self.gathered[row]]

    def _targets_of(self, file: int) -> Int64:
        return self.stored.order[self.stored.file_starts[file] : self.stored.file_starts[file + 1]]

    def _held(self, rank: int) -> Int64:
        order, starts = self._by_holder
        return order[starts[rank] : starts[rank + 1]] if rank + 1 < len(starts) else order[:0]

    def _fragments_of(self, targets: Int64) -> Int64:
        """Fragments are in the order of their targets, because targets are in the order of tensors."""
        starts = self._fragment_starts
        return ragged_positions(starts[targets], starts[targets + 1] - starts[targets])

    @cached_property
    def _fragment_starts(self) -> Int64:
        return np.searchsorted(self.target, np.arange(len(self.stored.shards) + 1))

    @cached_property
    def _by_holder(self) -> tuple[Int64, Int64]:
        return rows_by_rank(self.holder)

    @cached_property
    def _places(self) -> Int64:
        """By row of ``stored.shards``: where it begins in what its owner gathers, counting files that are gathered."""
        stored, places = self.stored, np.full(len(self.stored.shards), -1, np.int64)
        files, _ = rows_by_rank(np.array([file.rank for file in stored.files], np.int64))
        nbytes = stored.shards.nbytes(stored.tensors)
        targets = [self._targets_of(index) for index in files.tolist() if self.gathered[index]]
        if not targets:
            return places
        rows = np.concatenate(targets)
        file = stored.file[rows]
        rank = stored.owner[rows]
        # Every rank's output begins at 0 again, whole pieces after the one before it.
        found = item_places(file, nbytes[rows], self.piece_size)
        begins = np.flatnonzero(np.diff(rank, prepend=-1))
        places[rows] = found - np.repeat(found[begins], np.diff(np.append(begins, len(rows))))
        return places


def plan_gather(plan: SavePlan, layout: Layout, *, world_size: int, piece_size: int = PIECE_SIZE) -> GatherPlan | None:
    """Make whole what ``layout`` wants whole; None where that is nothing, so that ``plan`` stands as it is.

    Tensors already planned as one box stay with their writer. Each of the others gets one owner: the rank that holds
    most of it where its even share of all bytes leaves room, else the rank with the least to write. So no rank writes
    more than an even share and one such tensor, unless it does so without them. Raises ``PlanError`` for an unknown
    layout.
    """
    if layout not in LAYOUTS or piece_size < LEAST_PIECE or piece_size % LEAST_PIECE:
        raise PlanError(f"no layout {layout!r} in pieces of {piece_size}; layouts are {', '.join(LAYOUTS)}")
    if layout == "shards":
        return None
    shards, tensors = plan.shards, plan.tensors
    counts = np.bincount(shards.tensor, minlength=len(tensors))
    merged = counts > 1
    if layout == "merged":
        merged &= ~_regular(shards, counts)
    if not merged.any():
        return None
    owner_of = _choose_owners(plan, merged, world_size)
    kept = np.flatnonzero(~merged[shards.tensor])
    stored = _whole(plan, kept, np.flatnonzero(merged), owner_of)
    ndim = tensors.ndim[shards.tensor]
    target = np.searchsorted(stored.shards.tensor, shards.tensor)
    # A tensor that is kept in parts has one row for each of them, in the same order.
    target[kept] += kept - np.searchsorted(shards.tensor, shards.tensor[kept])
    offsets = np.where(np.repeat(merged[shards.tensor], ndim), shards.offsets, 0)
    boxes = BoxTable(shards.tensor, offsets, shards.lengths, shards.starts)
    return GatherPlan(stored, target, boxes, plan.owner, plan.source, piece_size)


def _regular(shards: BoxTable, counts: Int64) -> Bool:
    """By tensor: whether its boxes, which tile it, are a grid: one for each combination of its axes' offsets."""
    cells = np.ones(len(counts), np.float64)
    ndim = shards.starts[1:] - shards.starts[:-1]
    for axis in range(int(ndim.max(initial=0))):
        rows = np.flatnonzero((ndim > axis) & (counts > 1)[shards.tensor])
        tensor, offset = shards.tensor[rows], shards.offsets[shards.starts[rows] + axis]
        # Sorted by tensor already, and by the first axis within each.
        order = np.lexsort((offset, tensor)) if axis and offset.any() else np.arange(len(rows))
        tensor, offset = tensor[order], offset[order]
        fresh = np.ones(len(rows), np.bool_)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
        cells *= np.maximum(np.bincount(tensor[fresh], minlength=len(counts)), 1)
    regular: Bool = cells == counts
    return regular


def _choose_owners(plan: SavePlan, merged: Bool, world_size: int) -> Int64:
    """By tensor the rank that is to write it (-1 where it is not ``merged``).

    First come the tensors of which one rank holds most bytes: these are the bytes that need not travel.
    """
    nbytes = plan.shards.nbytes(plan.tensors)
    rows = merged[plan.shards.tensor]
    forced = np.bincount(plan.owner[~rows], weights=nbytes[~rows], minlength=world_size)
    loads: list[int] = forced.astype(np.int64).tolist()
    fair = -(-int(nbytes.sum()) // world_size)
    tensor, holders, held = _holdings(plan.shards.tensor[rows], plan.owner[rows], nbytes[rows], world_size)
    begins = np.searchsorted(tensor, np.arange(len(merged) + 1))
    sizes = np.bincount(tensor, weights=held, minlength=len(merged)).astype(np.int64)
    idle = [(load, rank) for rank, load in enumerate(loads)]
    heapify(idle)
    chosen = np.full(len(merged), -1, np.int64)
    which = np.flatnonzero(merged)
    for row in which[np.argsort(-held[begins[which]], kind="stable")].tolist():
        size, begin = int(sizes[row]), int(begins[row])
        end = min(int(begins[row + 1]), begin + _CANDIDATES)
        near = holders[begin:end].tolist()
        # Of those that hold much of it, the one with least to write: what it need not be sent hardly differs.
        much = near[: int((2 * held[begin:end] >= held[begin]).sum())]
        owner = min(much, key=lambda rank: (loads[rank], rank))
        if loads[owner] + size > fair:
            owner = next((rank for rank in near if loads[rank] + size <= fair), -1)
        if owner < 0:
            while loads[idle[0][1]] != idle[0][0]:
                heapreplace(idle, (loads[idle[0][1]], idle[0][1]))
            owner = idle[0][1]
        loads[owner] += size
        chosen[row] = owner
    return chosen


def _holdings(tensor: Int64, rank: Int64, nbytes: Int64, world_size: int) -> tuple[Int64, Int64, Int64]:
    """Who holds how much of each tensor: by tensor, those with most first, then by rank."""
    key, inverse = np.unique(tensor * world_size + rank, return_inverse=True)
    held = np.bincount(inverse, weights=nbytes, minlength=len(key)).astype(np.int64)
    order = np.lexsort((key, -held, key // world_size))
    return key[order] // world_size, key[order] % world_size, held[order]


def _whole(plan: SavePlan, kept: Int64, merged: Int64, owner_of: Int64) -> SavePlan:
    """``plan`` with one whole box, written by its owner, for each of the tensors ``merged``; ``kept`` rows stay."""
    tensors, old = plan.tensors, plan.shards.take(kept)
    shape = tensors.shape[ragged_positions(tensors.starts[merged], tensors.ndim[merged])]
    tensor = np.concatenate((old.tensor, merged))
    joined = BoxTable(
        tensor,
        np.concatenate((old.offsets, np.zeros_like(shape))),
        np.concatenate((old.lengths, shape)),
        ragged_starts(tensors.ndim[tensor]),
    )
    order = np.argsort(tensor, kind="stable")
    shards = joined.take(order)
    owner = np.concatenate((plan.owner[kept], owner_of[merged]))[order]
    source = np.concatenate((plan.source[kept], np.full(len(merged), -1, np.int64)))[order]
    stored = lay_out_files(tensors, shards, shards.nbytes(tensors), owner, source)
    stored.scope, stored.values = plan.scope, plan.values
    stored.aliases, stored.sections = plan.aliases, plan.sections
    return stored
