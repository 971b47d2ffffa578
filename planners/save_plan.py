"""Plan a save: from what every rank holds to the contents of every file. Pure and deterministic.

merge tables -> group replicas -> check the tiling -> balance by bytes -> lay out files
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgpack
import numpy as np

from ..errors import PlanError
from ..runtime.messages import ranks_text
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .balance import choose_writers
from .coverage import tiling_faults
from .dedup import ElementNumbers, Replicas, differs, group_replicas, number_elements
from .local_plan import ValueKey
from .plan_groups import HeldRows, PlanGroup, held_rows, whole_boxes
from .rank_sets import RankSets, distinct_sets
from .table_merge import (
    PlannedValues,
    merge_aliases,
    merge_pinned,
    merge_sections,
    merge_tensors,
    merge_values,
)
from .wire import Bool, pack, pack_slices

_MAX_ITEMSIZE = 16
_NONE: Int64 = np.empty(0, np.int64)


def consecutive_offsets(nbytes: Int64) -> tuple[Int64, int]:
    """Compute the offsets of items that lie one after the other.

    Within a file, larger element types come first, so that every item is aligned to its element size without padding.

    Args:
        nbytes: The size of each item in bytes.

    Returns:
        The offset of each item, and the total size, in bytes.
    """
    places = np.cumsum(nbytes, dtype=np.int64)
    total = int(places[-1]) if len(places) else 0
    places -= nbytes
    return places, total


class PlannedFile(NamedTuple):
    """A file of tensors that ``rank`` writes; ``data_size`` is in bytes and excludes the header."""

    section: str
    rank: int
    data_size: int


@dataclass(eq=False)
class SavePlan:
    """The plan of a complete save.

    Columns are by row of ``shards``, which are unique and sorted by tensor, then offsets.

    Attributes:
        tensors: Every tensor, sorted by full name.
        scope: By tensor, the rank that alone has it, or -1 if ranks share it.
        shards: The boxes to write.
        owner: The rank that writes a shard.
        source: The shard's row in its owner's ``LocalPlan.shards``.
        file: The shard's row in ``files``.
        offset: The shard's first byte in the data of its file.
        files: Every file of tensors, sorted by section, then rank.
        order: The shards file by file, in the order of their bytes.
        file_starts: The shards of file ``f`` are ``order[file_starts[f] : file_starts[f + 1]]``.
        values: The plain values to write.
        aliases: Pairs of full names (alias, target), sorted.
        sections: Pairs (name, kind of adapter), sorted.
    """

    tensors: TensorTable
    scope: Int64
    shards: BoxTable
    owner: Int64
    source: Int64
    file: Int64
    offset: Int64
    files: list[PlannedFile]
    order: Int64
    file_starts: Int64
    values: PlannedValues = field(default_factory=PlannedValues.none)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)

    def assignment_bytes(self, rank: int, files: Sequence[int] | None = None) -> bytes:
        """Return what one rank writes, packed for ``Assignment.from_bytes``.

        The columns of all ranks are packed at once.

        Args:
            rank: The rank.
            files: Rows of ``files`` to include; None for all files of the rank.

        Returns:
            The packed assignment.
        """
        rows = self.file_rows(rank) if files is None else files
        packed_rows, *columns = self._packed
        values, shared = (one[rank] if rank < len(one) else _NONE for one in columns)
        return pack([[(self.files[row].section, packed_rows[row]) for row in rows], values, shared])

    def file_rows(self, rank: int) -> Sequence[int]:
        """Return the rows in ``files`` that a rank writes.

        Args:
            rank: The rank.

        Returns:
            The rows, ascending.
        """
        return self._files_of.get(rank, ())

    def files_of(self, rank: int) -> list[tuple[str, str, int | None]]:
        """Return the files that a rank writes.

        Args:
            rank: The rank.

        Returns:
            The section and the kind (as in a manifest) of each file, and for a file of tensors its row in ``files``, in
            the order in which the rank writes them.
        """
        found: list[tuple[str, str, int | None]] = []
        found += [(self.files[row].section, "tensors", row) for row in self.file_rows(rank)]
        values = self._value_rows(rank)
        named = list(
            zip([self.values.keys[row][0] for row in values.tolist()], self.values.shared[values].tolist(), strict=True)
        )
        for kind, shared in (("values", True), ("rank_values", False)):
            sections = dict.fromkeys(section for section, is_shared in named if is_shared == shared)
            found += [(section, kind, None) for section in sections]
        return found

    @cached_property
    def _files_of(self) -> dict[int, list[int]]:
        files: dict[int, list[int]] = {}
        for index, file in enumerate(self.files):
            files.setdefault(file.rank, []).append(index)
        return files

    def _value_rows(self, rank: int) -> Int64:
        """Rows of ``values`` that ``rank`` writes."""
        return rows_of_rank(*self._values_by_rank, rank)

    @cached_property
    def _values_by_rank(self) -> tuple[Int64, Int64]:
        return rows_by_rank(self.values.rank)

    @cached_property
    def _packed(self) -> tuple[list[msgpack.ExtType], list[msgpack.ExtType], list[msgpack.ExtType]]:
        """By file, the packed column of its rows; by rank, the packed columns of its values and their flags."""
        order, starts = self._values_by_rank
        return (
            pack_slices(self.source[self.order], self.file_starts),
            pack_slices(self.values.index[order], starts),
            pack_slices(self.values.shared[order], starts),
        )


def rows_by_rank(rank: Int64) -> tuple[Int64, Int64]:
    """Return the rows sorted by rank, and where those of each rank, up to the highest, begin."""
    order = np.argsort(rank, kind="stable")
    return order, np.searchsorted(rank[order], np.arange(int(rank.max(initial=-1)) + 2))


def rows_of_rank(order: Int64, starts: Int64, rank: int) -> Int64:
    """Return the rows of one rank, from what ``rows_by_rank`` has returned."""
    return order[starts[rank] : starts[rank + 1]] if rank + 1 < len(starts) else order[:0]


def plan_groups(groups: Sequence[PlanGroup], differing: Collection[ValueKey], *, world_size: int) -> SavePlan:
    """Plan a save of what the ranks hold.

    Equal boxes of a tensor are replicas, and one rank writes each; for a pinned tensor it is the lowest holder. Empty
    boxes are dropped, except one whole box of a tensor without elements. A value that is equal on all its holders is
    written once.

    Args:
        groups: Ranks with the same table. Every rank is in one group.
        differing: The values that are not equal on all their holders.
        world_size: The number of ranks.

    Returns:
        The plan.

    Raises:
        PlanError: Ranks describe a tensor, alias or section differently, or boxes overlap, leave their tensor, or leave
            a hole. The message names every fault of one kind and the ranks concerned.
    """
    kinds = merge_sections(groups)
    sections = sorted({name for name, _ in kinds}.union(*(group.table.tensors.sections for group in groups)))
    tensors, scope, rows, own = merge_tensors(groups, sections)
    sets = RankSets(world_size)
    held = held_rows(groups, tensors, rows, own, sets)
    plan = _plan(tensors, held, sets, merge_pinned(groups, tensors, rows))
    plan.scope = scope
    plan.values = merge_values(groups, differing)
    plan.aliases = merge_aliases(groups, tensors)
    plan.sections = kinds
    return plan


def plan_columns(tensors: TensorTable, boxes: BoxTable, rank: Int64, source: Int64, *, world_size: int) -> SavePlan:
    """Plan a save from columns (see ``plan_groups``), without values, aliases or sections; all tensors are shared.

    Args:
        tensors: The tensors, sorted by name.
        boxes: The boxes that ranks hold. Any order is valid; sorted by rank is fastest.
        rank: By row of ``boxes``, the rank that holds it.
        source: By row of ``boxes``, its row in that rank's shards.
        world_size: The number of ranks.

    Returns:
        The plan.

    Raises:
        PlanError: As for ``plan_groups``.
    """
    return _plan(tensors, HeldRows(boxes, rank, source), RankSets(world_size), None)


def _plan(tensors: TensorTable, held: HeldRows, sets: RankSets, pinned: Bool | None) -> SavePlan:
    boxes = held.boxes
    numbers = number_elements(tensors, boxes)
    lowest = sets.lowest(held.member_set)
    _reject_outside(tensors, boxes, numbers, lowest)
    groups = group_replicas(numbers, np.flatnonzero(numbers.numel > 0), lowest)
    holders = _BoxHolders(groups, held.member_set, sets)
    shards, found = boxes.take(holders.unique), numbers.take(holders.unique)
    faults = tiling_faults(tensors, shards, found, holders.text)
    if faults:
        raise PlanError(_tiling_text(tensors, shards, holders, faults))
    nbytes = found.numel * tensors.itemsize()[shards.tensor]
    del numbers, found
    candidates = holders.member_sets()
    if pinned is not None and pinned.any():
        candidates = np.where(pinned[shards.tensor], sets.lowest(candidates), candidates)
    owner = choose_writers(nbytes, candidates, sets)
    source = held.source[holders.rows_of(owner)]
    shards, nbytes, owner, source = _with_empty(tensors, held, lowest, shards, nbytes, owner, source)
    return lay_out_files(tensors, shards, nbytes, owner, source)


class _BoxHolders:
    """The holders of each distinct box, which may occur in several rows."""

    def __init__(self, groups: Replicas, member_set: Int64, sets: RankSets) -> None:
        self._groups, self._member_set, self._sets = groups, member_set, sets
        self.unique: Int64 = groups.rows[groups.starts[:-1]]
        counts = groups.starts[1:] - groups.starts[:-1]
        self._many = np.flatnonzero(counts > 1)
        self._counts = counts[self._many]

    def ranks(self, low: int, high: int) -> list[int]:
        """The ranks that hold any of the boxes ``[low, high)``."""
        rows = self._groups.rows[self._groups.starts[low] : self._groups.starts[high]]
        found: list[int] = np.unique(self._sets.members(self._member_set[rows])[0]).tolist()
        return found

    def text(self, box: int) -> str:
        return ranks_text(self.ranks(box, box + 1))

    def member_sets(self) -> Int64:
        """The set of all ranks that hold each box."""
        numbers: Int64 = self._member_set[self.unique]
        if len(self._many):
            box, ranks, _ = self._expanded
            begins = np.flatnonzero(np.diff(box, prepend=-1))
            starts = np.append(begins, len(box)).astype(np.int64, copy=False)
            first, kind = distinct_sets(ranks, starts)
            counts = (starts[1:] - starts[:-1])[first]
            kinds = self._sets.add(ranks[ragged_positions(starts[first], counts)], ragged_starts(counts))
            numbers[self._many] = kinds[kind]
        return numbers

    def rows_of(self, rank: Int64) -> Int64:
        """The row in which ``rank[i]`` holds box ``i``."""
        if len(self._many) == 0:
            return self.unique
        rows: Int64 = self.unique.copy()
        many, width = self._many, self._sets.world_size
        box, ranks, held = self._expanded
        rows[many] = held[np.searchsorted(box * width + ranks, many * width + rank[many])]
        return rows

    @cached_property
    def _expanded(self) -> tuple[Int64, Int64, Int64]:
        """Box, rank and row of boxes that occur in several rows, sorted by box, then rank, each pair once."""
        rows = self._groups.rows[ragged_positions(self._groups.starts[self._many], self._counts)]
        ranks, counts = self._sets.members(self._member_set[rows])
        rows = np.repeat(rows, counts)
        box = np.repeat(np.repeat(self._many, self._counts), counts)
        key = box * self._sets.world_size + ranks
        if (key[1:] <= key[:-1]).any():
            key, first = np.unique(key, return_index=True)
            box, ranks, rows = box[first], ranks[first], rows[first]
        return box, ranks, rows


def _reject_outside(tensors: TensorTable, boxes: BoxTable, numbers: ElementNumbers, rank: Int64) -> None:
    outside = np.flatnonzero(~numbers.inside)
    if len(outside) == 0:
        return
    faults: list[str] = []
    bad, first, count = np.unique(boxes.tensor[outside], return_index=True, return_counts=True)
    for tensor, row, many in zip(bad.tolist(), outside[first].tolist(), count.tolist(), strict=True):
        more = f" (and {many - 1} more boxes)" if many > 1 else ""
        text = f"{_corner_text(boxes, row)} of rank {int(rank[row])}{more}"
        faults.append(f"{tensors.names[tensor]} {tensors.meta_of(tensor)}: {text}")
    raise PlanError("some boxes are not inside their tensors:\n  " + "\n  ".join(faults))


def _corner_text(boxes: BoxTable, row: int) -> str:
    span = slice(int(boxes.starts[row]), int(boxes.starts[row + 1]))
    return f"offsets {boxes.offsets[span].tolist()}, lengths {boxes.lengths[span].tolist()}"


def _tiling_text(tensors: TensorTable, shards: BoxTable, holders: _BoxHolders, faults: dict[int, list[str]]) -> str:
    lines = [f"the ranks' boxes do not tile {len(faults)} of {len(tensors)} tensors:"]
    for tensor, texts in sorted(faults.items()):
        low, high = np.searchsorted(shards.tensor, [tensor, tensor + 1]).tolist()
        held = f" (held by {ranks_text(holders.ranks(low, high))})" if high > low else ""
        lines.append(f"  {tensors.names[tensor]} {tensors.meta_of(tensor)}: {'; '.join(texts)}{held}")
    lines.append(
        "every element must be held by a rank. An optimizer creates the state of a parameter at its first gradient; if "
        "only some ranks have had one (experts without tokens), give the others a zero gradient for one step"
    )
    return "\n".join(lines)


def _with_empty(
    tensors: TensorTable, held: HeldRows, lowest: Int64, shards: BoxTable, nbytes: Int64, owner: Int64, source: Int64
) -> tuple[BoxTable, Int64, Int64, Int64]:
    """Add one whole box for each tensor without elements, written by the lowest rank that lists one."""
    is_empty = tensors.numel() == 0
    if not is_empty.any():
        return shards, nbytes, owner, source
    empty = np.flatnonzero(is_empty[held.boxes.tensor])
    empty = empty[np.lexsort((empty, lowest[empty], held.boxes.tensor[empty]))]
    tensor, first = np.unique(held.boxes.tensor[empty], return_index=True)
    rows = empty[first]
    shards, owner, source = add_whole(tensors, shards, owner, source, tensor, lowest[rows], held.source[rows])
    return shards, shards.nbytes(tensors), owner, source


def add_whole(
    tensors: TensorTable, shards: BoxTable, owner: Int64, source: Int64, added: Int64, by: Int64, its_row: Int64
) -> tuple[BoxTable, Int64, Int64]:
    """Add one whole box for each of the tensors ``added``, with its owner ``by`` and its source ``its_row``.

    The columns, by row of ``shards``, are returned sorted by tensor.
    """
    offsets, lengths = whole_boxes(tensors, added)
    joined = BoxTable.from_columns(
        tensors,
        np.concatenate((shards.tensor, added)),
        np.concatenate((shards.offsets, offsets)),
        np.concatenate((shards.lengths, lengths)),
    )
    order = np.argsort(joined.tensor, kind="stable")
    return joined.take(order), np.concatenate((owner, by))[order], np.concatenate((source, its_row))[order]


def lay_out_files(tensors: TensorTable, shards: BoxTable, nbytes: Int64, owner: Int64, source: Int64) -> SavePlan:
    """Lay out one file for each section and each rank that writes a part of it."""
    names = sorted(tensors.sections)
    by_name = np.array([names.index(name) for name in tensors.sections], np.int64)
    width = int(owner.max(initial=0)) + 1
    # One sort key per row: the file, then the element size, largest first. Rows are already sorted by tensor and box,
    # and a stable sort keeps that order.
    of_tensor = by_name[tensors.section] * (width * _MAX_ITEMSIZE) + (_MAX_ITEMSIZE - tensors.itemsize())
    key = owner * _MAX_ITEMSIZE
    key += of_tensor[shards.tensor]
    order = np.argsort(key, kind="stable")
    in_order = key[order]
    in_order //= _MAX_ITEMSIZE
    begins = np.flatnonzero(differs(in_order))
    file_starts = np.append(begins, len(order)).astype(np.int64, copy=False)
    counts = file_starts[1:] - file_starts[:-1]
    starts, total = consecutive_offsets(nbytes[order])
    ends = np.append(starts, total)[file_starts]
    file, offset = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    file[order] = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    starts -= np.repeat(ends[:-1], counts)
    offset[order] = starts
    section, rank = np.divmod(in_order[begins], width)
    files = list(
        map(PlannedFile, map(names.__getitem__, section.tolist()), rank.tolist(), (ends[1:] - ends[:-1]).tolist())
    )
    scope = np.full(len(tensors), -1, np.int64)
    return SavePlan(tensors, scope, shards, owner, source, file, offset, files, order, file_starts)
