"""Who writes which bytes where: from what every rank holds to the layout of every file. Pure and deterministic.

merge tables -> group replicas -> prove the tiling -> balance by bytes -> lay out files
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import PlanError
from ..geometry import Box
from ..tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .balance import choose_writers
from .coverage import tiling_faults
from .dedup import ElementNumbers, Replicas, group_replicas, number_elements
from .local_plan import LocalPlan
from .merge import (
    PlannedValue,
    ValueKey,
    merge_aliases,
    merge_pinned,
    merge_sections,
    merge_tensors,
    merge_values,
    ranks_text,
)
from .plan_groups import HeldRows, PlanGroup, group_plans, held_rows
from .rank_sets import RankSets, distinct_sets
from .wire import Bool, Fields, column, flags, pack

__all__ = [
    "Assignment",
    "PlannedFile",
    "SavePlan",
    "lay_out_files",
    "layout",
    "plan_columns",
    "plan_groups",
    "plan_save",
]

_KIND = "save assignment"
_MAX_ITEMSIZE = 16


def layout(nbytes: Int64) -> tuple[Int64, int]:
    """Where items of these sizes begin when laid one after the other, and where the last one ends, in bytes.

    Within a file larger element types come first, so every item is aligned to its element size with no padding.
    """
    ends = np.cumsum(nbytes, dtype=np.int64)
    return ends - nbytes, int(ends[-1]) if len(ends) else 0


@dataclass(frozen=True)
class PlannedFile:
    """A file of tensors that ``rank`` writes; ``data_size`` is in bytes and excludes the header."""

    section: str
    rank: int
    data_size: int


@dataclass(eq=False)
class Assignment:
    """What one rank is told to write: for each of its tensor files the section and the rows of its
    ``LocalPlan.shards`` in file order (``layout`` of their sizes gives the offsets), and which of its values."""

    files: list[tuple[str, Int64]]
    values: Int64
    shared: Bool

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, on any machine."""
        return pack(
            _KIND,
            {
                "sections": [section for section, _ in self.files],
                "rows": [column(rows) for _, rows in self.files],
                "values": column(self.values),
                "shared": flags(self.shared),
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, plan: LocalPlan | None = None) -> Assignment:
        """What the planning rank sent in answer to ``plan``, whose rows it must speak of.

        Raises ``PlanError`` for bytes that ``to_bytes`` would not have written.
        """
        fields = Fields(_KIND, data)
        shards, held = (2**62, 2**62) if plan is None else (len(plan.shards), len(plan.values))
        sections = fields.strings("sections")
        rows = fields.columns("rows", len(sections))
        values = fields.within("values", fields.integers("values"), 0, held)
        files = [(section, fields.within("rows", part, 0, shards)) for section, part in zip(sections, rows)]
        return cls(files, values, fields.flags("shared", len(values)))


@dataclass(eq=False)
class SavePlan:
    """The whole save. Columns are by row of ``shards``, which are unique and sorted by tensor, then offsets.

    ``tensors`` are sorted by full name; ``scope`` is by row of them (-1, or the one rank that has the tensor).
    ``owner`` is the rank that writes a shard, ``source`` the row in its ``LocalPlan.shards``, ``file`` an index into
    ``files`` (by section, then rank), ``offset`` bytes from the start of the file's data. ``order`` lists the shards
    file by file, each in the order of its bytes: those of file ``f`` are ``order[file_starts[f] : file_starts[f+1]]``.
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
    values: list[PlannedValue] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)

    def assignment(self, rank: int) -> Assignment:
        """What ``rank`` is to be told."""
        files = [
            (self.files[index].section, self.source[self.order[self.file_starts[index] : self.file_starts[index + 1]]])
            for index in self._files_of.get(rank, ())
        ]
        values = self._values_of.get(rank, [])
        return Assignment(
            files,
            np.array([value.index for value in values], np.int64),
            np.array([value.shared for value in values], np.bool_),
        )

    def files_of(self, rank: int) -> list[tuple[str, str, int | None]]:
        """The files that ``rank`` writes, in its order: section, kind (as a manifest calls it), and for a file of
        tensors its row in ``files``."""
        found: list[tuple[str, str, int | None]] = []
        found += [(self.files[row].section, "tensors", row) for row in self._files_of.get(rank, ())]
        values = self._values_of.get(rank, [])
        for kind, shared in (("values", True), ("rank_values", False)):
            sections = dict.fromkeys(value.section for value in values if value.shared == shared)
            found += [(section, kind, None) for section in sections]
        return found

    @cached_property
    def _files_of(self) -> dict[int, list[int]]:
        files: dict[int, list[int]] = {}
        for index, file in enumerate(self.files):
            files.setdefault(file.rank, []).append(index)
        return files

    @cached_property
    def _values_of(self) -> dict[int, list[PlannedValue]]:
        values: dict[int, list[PlannedValue]] = {}
        for value in self.values:
            values.setdefault(value.rank, []).append(value)
        return values


def plan_save(plans: Sequence[LocalPlan]) -> SavePlan:
    """Plan a save of what the ranks hold; ``plans[r]`` is rank ``r``'s.

    Equal boxes of a tensor are replicas, and one rank writes each (the lowest, where a rank has the tensor ``pinned``);
    empty boxes are dropped, but for one whole box of a tensor without elements. A value that is the same wherever it
    is held is written once. Raises ``PlanError`` that names every fault of one kind and the ranks concerned: tensors,
    aliases or sections of which ranks disagree, boxes that overlap, leave their tensor, or leave a hole.
    """
    digests: dict[ValueKey, bytes] = {}
    differing: set[ValueKey] = set()
    for plan in plans if len(plans) > 1 else ():
        for value in plan.values:
            key = value.section, value.path
            if digests.setdefault(key, value.digest) != value.digest:
                differing.add(key)
    return plan_groups(group_plans(plans), differing, world_size=len(plans))


def plan_groups(groups: Sequence[PlanGroup], differing: Collection[ValueKey], *, world_size: int) -> SavePlan:
    """``plan_save`` of groups of ranks; every rank is in one of them. ``differing`` are the values that are not the
    same wherever they are held."""
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


def plan_columns(
    tensors: TensorTable, boxes: BoxTable, rank: Int64, source: Int64, *, world_size: int, pinned: Bool | None = None
) -> SavePlan:
    """``plan_save`` from columns: row ``i`` of ``boxes`` is row ``source[i]`` of what ``rank[i]`` holds.

    ``tensors`` are sorted by name. Rows may come in any order; in the order of ranks is fastest. Every shared scope;
    no values, aliases or section kinds.
    """
    return _plan(tensors, HeldRows(boxes, rank, source), RankSets(world_size), pinned)


def _plan(tensors: TensorTable, held: HeldRows, sets: RankSets, pinned: Bool | None) -> SavePlan:
    boxes = held.boxes
    numbers = number_elements(tensors, boxes)
    lowest = sets.lowest(held.member_set)
    _refuse_outside(tensors, boxes, numbers, lowest)
    groups = group_replicas(numbers, np.flatnonzero(numbers.numel > 0), lowest)
    unique = groups.rows[groups.starts[:-1]]
    shards = boxes.take(unique)
    found = ElementNumbers(numbers.first[unique], numbers.last[unique], numbers.numel[unique], numbers.inside[unique])
    holders = _Holders(groups, held.member_set, sets)
    faults = tiling_faults(tensors, shards, found, holders.text)
    if faults:
        raise PlanError(_tiling_text(tensors, shards, holders, faults))
    nbytes = found.numel * tensors.itemsize()[shards.tensor]
    del numbers, found, unique
    candidates = holders.member_sets()
    if pinned is not None and pinned.any():
        candidates = np.where(pinned[shards.tensor], sets.lowest(candidates), candidates)
    owner = choose_writers(nbytes, candidates, sets)
    source = held.source[holders.rows_of(owner)]
    shards, nbytes, owner, source = _with_empty(tensors, held, lowest, shards, nbytes, owner, source)
    return lay_out_files(tensors, shards, nbytes, owner, source)


class _Holders:
    """Who holds each distinct box, which may stand in several rows."""

    def __init__(self, groups: Replicas, member_set: Int64, sets: RankSets) -> None:
        self._groups, self._member_set, self._sets = groups, member_set, sets
        self._counts = groups.starts[1:] - groups.starts[:-1]

    def ranks(self, low: int, high: int) -> list[int]:
        """Who holds any of the boxes ``[low, high)``."""
        rows = self._groups.rows[self._groups.starts[low] : self._groups.starts[high]]
        found: list[int] = np.unique(self._sets.members(self._member_set[rows])[0]).tolist()
        return found

    def text(self, box: int) -> str:
        return ranks_text(self.ranks(box, box + 1))

    def member_sets(self) -> Int64:
        """The set of all ranks that hold each box."""
        numbers: Int64 = self._member_set[self._groups.rows[self._groups.starts[:-1]]]
        many = np.flatnonzero(self._counts > 1)
        if len(many):
            box, ranks, _ = self._spelled_out
            begins = np.flatnonzero(np.diff(box, prepend=-1))
            starts = np.append(begins, len(box)).astype(np.int64, copy=False)
            first, kind = distinct_sets(ranks, starts)
            counts = (starts[1:] - starts[:-1])[first]
            kinds = self._sets.add(ranks[ragged_positions(starts[first], counts)], ragged_starts(counts))
            numbers[many] = kinds[kind]
        return numbers

    def rows_of(self, rank: Int64) -> Int64:
        """The row in which ``rank[i]`` holds box ``i``."""
        rows: Int64 = self._groups.rows[self._groups.starts[:-1]].copy()
        many = np.flatnonzero(self._counts > 1)
        if len(many):
            box, ranks, held = self._spelled_out
            width = self._sets.world_size
            rows[many] = held[np.searchsorted(box * width + ranks, many * width + rank[many])]
        return rows

    @cached_property
    def _spelled_out(self) -> tuple[Int64, Int64, Int64]:
        """Box, rank and row, of boxes that stand in several rows; by box, then rank, each pair once."""
        many = np.flatnonzero(self._counts > 1)
        rows = self._groups.rows[ragged_positions(self._groups.starts[many], self._counts[many])]
        ranks, counts = self._sets.members(self._member_set[rows])
        rows = np.repeat(rows, counts)
        box = np.repeat(np.repeat(many, self._counts[many]), counts)
        key = box * self._sets.world_size + ranks
        if (key[1:] <= key[:-1]).any():
            key, first = np.unique(key, return_index=True)
            box, ranks, rows = box[first], ranks[first], rows[first]
        return box, ranks, rows


def _refuse_outside(tensors: TensorTable, boxes: BoxTable, numbers: ElementNumbers, rank: Int64) -> None:
    outside = np.flatnonzero(~numbers.inside)
    if len(outside) == 0:
        return
    faults: list[str] = []
    bad, first, count = np.unique(boxes.tensor[outside], return_index=True, return_counts=True)
    for tensor, row, many in zip(bad.tolist(), outside[first].tolist(), count.tolist()):
        more = f" (and {many - 1} more boxes)" if many > 1 else ""
        text = f"{_corner_text(boxes, row)} of rank {int(rank[row])}{more}"
        faults.append(f"{tensors.names[tensor]} {tensors.meta_of(tensor)}: {text}")
    raise PlanError("boxes that are not inside their tensors:\n  " + "\n  ".join(faults))


def _corner_text(boxes: BoxTable, row: int) -> str:
    span = slice(int(boxes.starts[row]), int(boxes.starts[row + 1]))
    return f"offsets {boxes.offsets[span].tolist()}, lengths {boxes.lengths[span].tolist()}"


def _tiling_text(tensors: TensorTable, shards: BoxTable, holders: _Holders, faults: dict[int, list[str]]) -> str:
    lines = [f"what the ranks hold does not make up {len(faults)} of {len(tensors)} tensors:"]
    for tensor, texts in sorted(faults.items()):
        low, high = np.searchsorted(shards.tensor, [tensor, tensor + 1]).tolist()
        held = f" (held by {ranks_text(holders.ranks(low, high))})" if high > low else ""
        lines.append(f"  {tensors.names[tensor]} {tensors.meta_of(tensor)}: {'; '.join(texts)}{held}")
    lines.append(
        "every element must be held by some rank. Optimizer state is made at a parameter's first gradient: where only "
        "some ranks have had one (experts without tokens), give the others a zero gradient for one step"
    )
    return "\n".join(lines)


def _with_empty(
    tensors: TensorTable, held: HeldRows, lowest: Int64, shards: BoxTable, nbytes: Int64, owner: Int64, source: Int64
) -> tuple[BoxTable, Int64, Int64, Int64]:
    """Add one whole box for each tensor without elements, written by the lowest rank that lists one."""
    empty = np.flatnonzero((tensors.numel() == 0)[held.boxes.tensor])
    if len(empty) == 0:
        return shards, nbytes, owner, source
    empty = empty[np.lexsort((empty, lowest[empty], held.boxes.tensor[empty]))]
    tensor, first = np.unique(held.boxes.tensor[empty], return_index=True)
    rows = empty[first]
    whole = [(row, Box.whole(tensors.shape_of(row))) for row in tensor.tolist()]
    added = BoxTable.build(whole)
    joined = BoxTable.from_columns(
        tensors,
        np.concatenate((shards.tensor, added.tensor)),
        np.concatenate((shards.offsets, added.offsets)),
        np.concatenate((shards.lengths, added.lengths)),
    )
    order = np.argsort(joined.tensor, kind="stable")
    sizes = np.concatenate((nbytes, np.zeros(len(tensor), np.int64)))
    owners, sources = np.concatenate((owner, lowest[rows])), np.concatenate((source, held.source[rows]))
    return joined.take(order), sizes[order], owners[order], sources[order]


def lay_out_files(tensors: TensorTable, shards: BoxTable, nbytes: Int64, owner: Int64, source: Int64) -> SavePlan:
    """One file for each section and rank that writes any of it."""
    names = sorted(tensors.sections)
    by_name = np.array([names.index(name) for name in tensors.sections], np.int64)
    width = int(owner.max(initial=0)) + 1
    key = by_name[tensors.section][shards.tensor] * width + owner
    # Rows are in the order of tensor and box already, and a stable sort leaves them so.
    itemsize = tensors.itemsize()
    order = np.argsort(key * _MAX_ITEMSIZE + (_MAX_ITEMSIZE - itemsize)[shards.tensor], kind="stable")
    in_order = key[order]
    begins = np.flatnonzero(np.diff(in_order, prepend=-1))
    file_starts = np.append(begins, len(order)).astype(np.int64, copy=False)
    counts = file_starts[1:] - file_starts[:-1]
    starts, total = layout(nbytes[order])
    ends = np.append(starts, total)[file_starts]
    file, offset = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    file[order] = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    offset[order] = starts - np.repeat(ends[:-1], counts)
    files = [
        PlannedFile(names[code // width], code % width, size)
        for code, size in zip(in_order[begins].tolist(), (ends[1:] - ends[:-1]).tolist())
    ]
    scope = np.full(len(tensors), -1, np.int64)
    return SavePlan(tensors, scope, shards, owner, source, file, offset, files, order, file_starts)
