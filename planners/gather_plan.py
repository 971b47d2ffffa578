"""Choose the tensors to store whole although ranks hold parts of them, and plan which rank sends what to which owner.

In a save plan, every box has a writer. Here the boxes of a tensor become fragments that travel to one owner, which
writes the tensor as one. Pure and deterministic, like the save plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Literal

import numpy as np

from ..format.hf_index import ADAPTER_SECTION
from ..format.safetensors import shard_name
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_positions
from .gather_share import PIECE_SIZE, GatherShare, item_places
from .save_plan import SavePlan, add_whole, lay_out_files, rows_by_rank, rows_of_rank
from .wire import Bool

Layout = Literal["shards", "merged", "whole"]
"""How to store a tensor that ranks hold in parts.

``shards`` stores the parts, with irregular ones decomposed into boxes. ``merged`` stores a tensor whole if its parts do
not form a regular grid. ``whole`` stores every tensor whole, and the adapter of PEFT in one file, which rank 0 writes.
"""

# The number of a tensor's largest holders that are considered as its owner before all other ranks.
_MAX_CANDIDATES = 8


@dataclass(eq=False)
class GatherPlan:
    """A save plan in which some tensors are stored whole, and the fragments that they consist of.

    The columns are by fragment, which is a shard of the original plan, sorted by tensor, then offsets.

    Attributes:
        stored: The plan of what will be on storage; its ``source`` is -1 for a tensor that is gathered.
        target: The row of ``stored.shards`` that a fragment becomes part of.
        boxes: The fragment's box, in the target's own coordinates.
        holder: The rank that stages the fragment.
        row: The fragment's row in that rank's ``LocalPlan.shards``.
        piece_size: Bytes of a file that are gathered and written at once.
    """

    stored: SavePlan
    target: Int64
    boxes: BoxTable
    holder: Int64
    row: Int64
    piece_size: int

    @cached_property
    def gathered(self) -> Bool:
        """By file of ``stored``: whether any part of it consists of fragments. Other files need no gathering."""
        found = np.zeros(len(self.stored.files), np.bool_)
        found[self.stored.file[self.stored.source < 0]] = True
        return found

    def assignment_bytes(self, rank: int) -> bytes:
        """Return what a rank writes without gathering, packed for ``Assignment.from_bytes``.

        Args:
            rank: The rank.

        Returns:
            Its values, and its files without gathered tensors.
        """
        return self.stored.assignment_bytes(rank, self._files_alone(rank))

    def share(self, rank: int) -> GatherShare:
        """Return what a rank sends, gathers and writes in addition to its ``assignment_bytes``.

        Args:
            rank: The rank.

        Returns:
            Its part of the gather plan.
        """
        stored = self.stored
        sent = rows_of_rank(*self._by_holder, rank)
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
        """Rows of ``stored.shards`` as tensors, named as in the file."""
        tensors, shards = self.stored.tensors, self.stored.shards.take(rows)
        file = self.stored.file[rows]
        sections = [self.stored.files[index].section for index in np.unique(file).tolist()]
        names = []
        for index, tensor in enumerate(shards.tensor.tolist()):
            box = shards.box_of(index)
            whole = box.lengths == tensors.shape_of(tensor)
            names.append(f"{tensors.section_of(tensor)}.{shard_name(tensors.fqn_of(tensor), box, whole=whole)}")
        section = np.unique(file, return_inverse=True)[1].astype(np.int64)
        return TensorTable(
            names, sections, section, tensors.dtype[shards.tensor], tensors.ndim[shards.tensor], shards.lengths
        )

    def _files_alone(self, rank: int) -> list[int]:
        return [row for row in self.stored.file_rows(rank) if not self.gathered[row]]

    def _targets_of(self, file: int) -> Int64:
        return self.stored.order[self.stored.file_starts[file] : self.stored.file_starts[file + 1]]

    def _fragments_of(self, targets: Int64) -> Int64:
        """Return the fragments of ``targets``. Fragments are sorted by target, because targets are sorted by tensor."""
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
        """Where a row of ``stored.shards`` begins in its owner's output, which consists of the gathered files."""
        stored, places = self.stored, np.full(len(self.stored.shards), -1, np.int64)
        files, _ = rows_by_rank(np.array([file.rank for file in stored.files], np.int64))
        nbytes = stored.shards.nbytes(stored.tensors)
        targets = [self._targets_of(index) for index in files.tolist() if self.gathered[index]]
        if not targets:
            return places
        rows = np.concatenate(targets)
        file = stored.file[rows]
        rank = stored.owner[rows]
        # Every rank's output begins at 0; item_places has put them one after the other.
        found = item_places(file, nbytes[rows], self.piece_size)
        begins = np.flatnonzero(np.diff(rank, prepend=-1))
        places[rows] = found - np.repeat(found[begins], np.diff(np.append(begins, len(rows))))
        return places


def plan_gather(plan: SavePlan, layout: Layout, *, world_size: int, piece_size: int = PIECE_SIZE) -> GatherPlan | None:
    """Plan which tensors to gather for a layout.

    A tensor that is already planned as one box keeps its writer. Each other tensor gets one owner: the rank that holds
    most of it if that stays within an even share of all bytes, else the rank with the least to write. So no rank writes
    more than an even share plus one such tensor, unless the save plan already assigns more to it.

    Args:
        plan: The save plan.
        layout: What to store of a tensor that ranks hold in parts (see ``Layout``).
        world_size: The number of ranks.
        piece_size: Bytes of a file that are gathered and written at once; a multiple of 16, so that no element lies in
            two pieces.

    Returns:
        The gather plan, or None if nothing is gathered and ``plan`` remains as it is.
    """
    if layout == "shards":
        return None
    shards, tensors = plan.shards, plan.tensors
    counts = np.bincount(shards.tensor, minlength=len(tensors))
    merged = counts > 1
    in_one_file = np.zeros(len(tensors), np.bool_)
    if layout == "merged":
        merged &= ~_regular(shards, counts)
    elif ADAPTER_SECTION in tensors.sections:
        in_one_file = tensors.section == tensors.sections.index(ADAPTER_SECTION)
        merged[shards.tensor[plan.owner != 0]] |= in_one_file[shards.tensor[plan.owner != 0]]
    if not merged.any():
        return None
    owner_of = _choose_owners(plan, merged, world_size)
    owner_of[merged & in_one_file] = 0
    kept = np.flatnonzero(~merged[shards.tensor])
    stored = _whole(plan, kept, np.flatnonzero(merged), owner_of)
    ndim = tensors.ndim[shards.tensor]
    target = np.searchsorted(stored.shards.tensor, shards.tensor)
    # A tensor that stays in parts has one row for each part, in the same order.
    target[kept] += kept - np.searchsorted(shards.tensor, shards.tensor[kept])
    offsets = np.where(np.repeat(merged[shards.tensor], ndim), shards.offsets, 0)
    boxes = BoxTable(shards.tensor, offsets, shards.lengths, shards.starts)
    return GatherPlan(stored, target, boxes, plan.owner, plan.source, piece_size)


def _regular(shards: BoxTable, counts: Int64) -> Bool:
    """By tensor: whether its boxes, which tile it, form a grid: one box for each combination of its axes' offsets."""
    cells = np.ones(len(counts), np.float64)
    ndim = shards.starts[1:] - shards.starts[:-1]
    for axis in range(int(ndim.max(initial=0))):
        rows = np.flatnonzero((ndim > axis) & (counts > 1)[shards.tensor])
        tensor, offset = shards.tensor[rows], shards.offsets[shards.starts[rows] + axis]
        # The rows are already sorted by tensor, and by the first axis within each tensor.
        order = np.lexsort((offset, tensor)) if axis and offset.any() else np.arange(len(rows))
        tensor, offset = tensor[order], offset[order]
        fresh = np.ones(len(rows), np.bool_)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
        cells *= np.maximum(np.bincount(tensor[fresh], minlength=len(counts)), 1)
    regular: Bool = cells == counts
    return regular


def _choose_owners(plan: SavePlan, merged: Bool, world_size: int) -> Int64:
    """By tensor: the rank that writes it (-1 if it is not ``merged``).

    Tensors of which one rank holds most bytes come first: these bytes need not be sent.
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
        end = min(int(begins[row + 1]), begin + _MAX_CANDIDATES)
        near = holders[begin:end].tolist()
        # Of the ranks that hold much of it, take the one with the least to write: the bytes to send hardly differ.
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
    """Return tensor, rank and bytes of each rank's part of each tensor, by tensor, largest part first, then by rank."""
    key, inverse = np.unique(tensor * world_size + rank, return_inverse=True)
    held = np.bincount(inverse, weights=nbytes, minlength=len(key)).astype(np.int64)
    order = np.lexsort((key, -held, key // world_size))
    return key[order] // world_size, key[order] % world_size, held[order]


def _whole(plan: SavePlan, kept: Int64, merged: Int64, owner_of: Int64) -> SavePlan:
    """Return ``plan`` with one whole box, written by its owner, for each tensor in ``merged``; ``kept`` rows remain."""
    tensors, gathered = plan.tensors, np.full(len(merged), -1, np.int64)
    shards, owner, source = add_whole(
        tensors, plan.shards.take(kept), plan.owner[kept], plan.source[kept], merged, owner_of[merged], gathered
    )
    stored = lay_out_files(tensors, shards, shards.nbytes(tensors), owner, source)
    stored.scope, stored.values = plan.scope, plan.values
    stored.aliases, stored.sections = plan.aliases, plan.sections
    return stored
