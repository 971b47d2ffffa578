"""Who writes what several ranks hold: worst-fit, largest first, by bytes.

What only one rank holds is that rank's to write and counts as load from the start. Every choice is deterministic:
among the least loaded, the lowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from ..tables import Int64, ragged_positions, ragged_starts

__all__ = ["choose_writers"]

# Measured, in units of placing one group by heap (about 1.5 us): a round, and a member of a set in it.
_ROUND_COST, _CELL_COST = 20.0, 0.002


@dataclass(eq=False)
class _Shared:
    """Groups that need a choice. Groups of one ``member set`` have the same ranks: those of set ``s`` are
    ``ranks[starts[s] : starts[s + 1]]``."""

    nbytes: Int64
    member_set: Int64
    ranks: Int64
    starts: Int64


def choose_writers(nbytes: Int64, starts: Int64, rank: Int64, world_size: int) -> Int64:
    """For each group of replicas, the position (into ``rank``) of the member that writes it.

    Group ``g`` is ``nbytes[g]`` bytes held by ``rank[starts[g] : starts[g + 1]]``, ascending and not empty.
    The largest load exceeds the even share by no more than the largest shared item, unless forced or because
    ranks hold too different things.
    """
    counts = starts[1:] - starts[:-1]
    chosen: Int64 = starts[:-1].copy()
    multi = np.flatnonzero(counts > 1)
    if len(multi) == 0:
        return chosen
    single = np.flatnonzero(counts == 1)
    # Exact: a rank's bytes stay far below 2**53.
    forced = np.bincount(rank[chosen[single]], weights=nbytes[single], minlength=world_size).astype(np.int64)
    shared = _shared(nbytes[multi], starts[multi], counts[multi], rank)
    chosen[multi] += _choose(shared, forced)
    return chosen


def _shared(nbytes: Int64, starts: Int64, counts: Int64, rank: Int64) -> _Shared:
    """Find which groups have the same members: by a hash of them, then proven member by member."""
    where = ragged_positions(starts, counts)
    members = rank[where]
    begin = np.cumsum(counts) - counts
    digest = np.add.reduceat(_mix(members), begin) ^ _mix(counts)
    _, first, member_set = np.unique(digest, return_index=True, return_inverse=True)
    first, member_set = _set_apart(first, member_set, counts != counts[first[member_set]])
    like = members[ragged_positions(begin[first[member_set]], counts)]
    first, member_set = _set_apart(first, member_set, np.logical_or.reduceat(members != like, begin))
    set_counts = counts[first]
    ranks = members[ragged_positions(begin[first], set_counts)]
    return _Shared(nbytes, member_set, ranks, ragged_starts(set_counts))


def _set_apart(first: Int64, member_set: Int64, odd: npt.NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Give each group that only the hash took for a member of its set a set of its own."""
    rows = np.flatnonzero(odd)
    member_set[rows] = len(first) + np.arange(len(rows))
    return np.append(first, rows), member_set


def _mix(values: Int64) -> npt.NDArray[np.uint64]:
    """Well-spread 64-bit words (splitmix64), so that sums of them tell sets apart."""
    word: npt.NDArray[np.uint64] = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def _choose(shared: _Shared, forced: Int64) -> Int64:
    """Which member of its set writes each group."""
    largest_first = np.argsort(-shared.nbytes, kind="stable")
    widths = shared.starts[1:] - shared.starts[:-1]
    if len(np.unique(shared.ranks)) == len(shared.ranks):
        rounds = int(np.bincount(shared.member_set).max())
        if rounds * (_ROUND_COST + _CELL_COST * len(widths) * float(widths.max())) < len(shared.nbytes):
            return _choose_by_rounds(shared, forced, largest_first)
    choice, loads = _choose_by_heaps(shared, forced, largest_first)
    bound = max(float(forced.max()), (float(forced.sum()) + float(shared.nbytes.sum())) / len(forced))
    if float(loads.max()) > 1.02 * bound:
        # Sets that overlap: placing the least movable first is sometimes better.
        least_movable_first = largest_first[np.argsort(widths[shared.member_set[largest_first]], kind="stable")]
        other, other_loads = _choose_by_heaps(shared, forced, least_movable_first)
        if other_loads.max() < loads.max():
            return other
    return choice


def _choose_by_heaps(shared: _Shared, forced: Int64, order: Int64) -> tuple[Int64, Int64]:
    """Group by group. One heap a set; loads only grow, so an entry that is out of date is put back when it comes up."""
    loads: list[int] = forced.tolist()
    bounds, ranks = shared.starts.tolist(), shared.ranks.tolist()
    members = [ranks[bounds[s] : bounds[s + 1]] for s in range(len(bounds) - 1)]
    heaps = [[(loads[rank], index) for index, rank in enumerate(member)] for member in members]
    for heap in heaps:
        heapify(heap)
    choice = np.empty(len(order), np.int64)
    sizes, sets = shared.nbytes[order].tolist(), shared.member_set[order].tolist()
    picked: list[int] = []
    for size, which in zip(sizes, sets):
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
    """The same choice for sets that share no rank: round ``k`` places the ``k``-th largest group of every set."""
    per_set = np.bincount(shared.member_set, minlength=len(shared.starts) - 1)
    # Sets with many groups come first, so that those still busy in a round are a prefix.
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
