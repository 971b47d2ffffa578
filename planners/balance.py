"""Choose which rank writes what several ranks hold (worst-fit by bytes, largest first), and what a rank is sent of it.

What only one rank holds counts as its load from the start. Every choice is deterministic: of the least loaded ranks,
the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from ..tensors.tables import Int64, ragged_positions, ragged_starts
from .rank_sets import RankSets, distinct_sets
from .wire import Bool, unpack

# Measured costs of a round, and of one member of a set in it, relative to placing one item by heap (about 1.5 us).
_ROUND_COST, _CELL_COST = 20.0, 0.002
# Rounds are used if at most one item, or one byte, in this many belongs to a set that overlaps others.
_FEW = 20


@dataclass(eq=False)
class _Shared:
    """Items that several ranks hold.

    ``member_set`` is the set of each; set ``s`` is ``ranks[starts[s] : starts[s + 1]]``.
    """

    nbytes: Int64
    member_set: Int64
    ranks: Int64
    starts: Int64


def choose_writers(nbytes: Int64, member_set: Int64, sets: RankSets) -> Int64:
    """Return, for each item, the rank that writes it, out of the set of ranks ``member_set`` that hold it.

    The largest load exceeds the even share by at most the largest shared item, unless the holders force a larger one.
    """
    chosen = sets.lowest(member_set)
    multi = np.flatnonzero(~sets.are_single(member_set))
    if len(multi) == 0:
        return chosen
    # Floats are exact here: a rank's bytes stay far below 2**53.
    alone = nbytes.astype(np.float64)
    alone[multi] = 0
    forced = np.bincount(chosen, weights=alone, minlength=sets.world_size).astype(np.int64)
    used = np.flatnonzero(np.bincount(member_set[multi], minlength=len(sets)))
    which = np.searchsorted(used, member_set[multi])
    ranks, sizes = sets.members(used)
    starts = ragged_starts(sizes)
    first, kind = distinct_sets(ranks, starts)
    ranks = ranks[ragged_positions(starts[first], sizes[first])]
    shared = _Shared(nbytes[multi], kind[which], ranks, ragged_starts(sizes[first]))
    chosen[multi] = shared.ranks[shared.starts[shared.member_set] + _choose(shared, forced)]
    return chosen


def _choose(shared: _Shared, forced: Int64) -> Int64:
    """Return which member of its set writes each item."""
    alone = _disjoint(shared)
    items = alone[shared.member_set]
    rounds = int(np.bincount(shared.member_set[items], minlength=1).max())
    widths = shared.starts[1:] - shared.starts[:-1]
    cost = rounds * (_ROUND_COST + _CELL_COST * int(alone.sum()) * float(widths[alone].max(initial=0)))
    others = int((~items).sum()), int(shared.nbytes[~items].sum())
    if cost < int(items.sum()) and (_FEW * others[0] <= len(items) or _FEW * others[1] <= int(shared.nbytes.sum())):
        # The remaining items are few and have more choice; placing the others afterwards evens out their bytes.
        choice = np.empty(len(items), np.int64)
        rest = _part(shared, ~items, ~alone)
        choice[~items], loads = _choose_by_heaps(rest, forced, _largest_first(rest))
        most = _part(shared, items, alone)
        choice[items] = _choose_by_rounds(most, loads, _largest_first(most))
        return choice
    largest_first = _largest_first(shared)
    choice, loads = _choose_by_heaps(shared, forced, largest_first)
    if not alone.all():
        # The sets overlap: placing the items with the least choice first is sometimes better.
        least_movable_first = largest_first[np.argsort(widths[shared.member_set[largest_first]], kind="stable")]
        other, other_loads = _choose_by_heaps(shared, forced, least_movable_first)
        if other_loads.max() < loads.max():
            return other
    return choice


def _largest_first(shared: _Shared) -> Int64:
    return np.argsort(-shared.nbytes, kind="stable")


def _disjoint(shared: _Shared) -> Bool:
    """Return sets that have no rank in common, preferring those with most items."""
    widths = shared.starts[1:] - shared.starts[:-1]
    busiest = np.argsort(-np.bincount(shared.member_set, minlength=len(widths)), kind="stable")
    if len(np.unique(shared.ranks)) == len(shared.ranks):
        return np.ones(len(widths), np.bool_)
    taken = np.zeros(int(shared.ranks.max()) + 1, np.bool_)
    found = np.zeros(len(widths), np.bool_)
    for which in busiest.tolist():
        members = shared.ranks[shared.starts[which] : shared.starts[which + 1]]
        if not taken[members].any():
            taken[members] = found[which] = True
    return found


def _part(shared: _Shared, items: Bool, sets: Bool) -> _Shared:
    """Return some of the items; their sets are among ``sets``."""
    widths = (shared.starts[1:] - shared.starts[:-1])[sets]
    ranks = shared.ranks[ragged_positions(shared.starts[:-1][sets], widths)]
    number = np.cumsum(sets) - 1
    return _Shared(shared.nbytes[items], number[shared.member_set[items]], ranks, ragged_starts(widths))


def _choose_by_heaps(shared: _Shared, forced: Int64, order: Int64) -> tuple[Int64, Int64]:
    """Place item by item, with one heap per set.

    Loads only grow, so an entry that is out of date is put back when it reaches the top.
    """
    loads: list[int] = forced.tolist()
    bounds, ranks = shared.starts.tolist(), shared.ranks.tolist()
    members = [ranks[bounds[s] : bounds[s + 1]] for s in range(len(bounds) - 1)]
    heaps = [[(loads[rank], index) for index, rank in enumerate(member)] for member in members]
    for heap in heaps:
        heapify(heap)
    choice = np.empty(len(order), np.int64)
    sizes, sets = shared.nbytes[order].tolist(), shared.member_set[order].tolist()
    picked: list[int] = []
    for size, which in zip(sizes, sets, strict=True):
        heap, member = heaps[which], members[which]
        load, index = heap[0]
        while loads[member[index]] != load:
            heapreplace(heap, (loads[member[index]], index))
            load, index = heap[0]
        loads[member[index]] = load + size
        heapreplace(heap, (load + size, index))
        picked.append(index)
    choice[order] = picked
    return choice, np.array(loads, np.int64)


def _choose_by_rounds(shared: _Shared, forced: Int64, order: Int64) -> Int64:
    """Make the same choice for disjoint sets: round ``k`` places the ``k``-th largest item of every set."""
    per_set = np.bincount(shared.member_set, minlength=len(shared.starts) - 1)
    # Sets with many items come first, so that the sets that take part in a round are a prefix.
    place = np.empty(len(per_set), np.int64)
    busiest = np.argsort(-per_set, kind="stable")
    place[busiest] = np.arange(len(per_set))
    widths = (shared.starts[1:] - shared.starts[:-1])[busiest]
    filled = np.arange(int(widths.max())) < widths[:, None]
    loads = np.full(filled.shape, np.iinfo(np.int64).max, np.int64)
    loads[filled] = forced[shared.ranks[ragged_positions(shared.starts[:-1][busiest], widths)]]
    rows = place[shared.member_set[order]]
    by_set = np.argsort(rows, kind="stable")
    ends = np.cumsum(per_set[busiest])
    round_of = np.arange(len(order)) - np.repeat(ends - per_set[busiest], per_set[busiest])
    groups = order[by_set][np.argsort(round_of, kind="stable")]
    choice = np.empty(len(order), np.int64)
    at = 0
    for width in np.bincount(round_of).tolist():
        now = groups[at : at + width]
        index = np.argmin(loads[:width], axis=1)
        loads[np.arange(width), index] += shared.nbytes[now]
        choice[now] = index
        at += width
    return choice


@dataclass(eq=False)
class Assignment:
    """What one rank writes.

    Attributes:
        files: For each tensor file, the section and the rows of the rank's ``LocalPlan.shards`` in file order.
            ``consecutive_offsets`` of their sizes gives their offsets.
        values: Rows of the values of the rank's ``PlanTable``.
        shared: Whether the rank writes a value for all ranks, by row of ``values``.
    """

    files: list[tuple[str, Int64]]
    values: Int64
    shared: Bool

    @classmethod
    def from_bytes(cls, data: bytes) -> Assignment:
        """Unpack what the planning rank sent.

        Args:
            data: What ``SavePlan.assignment_bytes`` has returned.

        Returns:
            The assignment.
        """
        files, values, shared = unpack(data)
        return cls([(section, rows) for section, rows in files], values, shared)
