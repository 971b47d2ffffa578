"""Numbered sets of ranks that hold the same, so that what thousands of ranks hold is one row of a plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tensors.tables import Int64, ragged_positions, ragged_starts
from .wire import Bool


class RankSets:
    """Non-empty sets of ranks. Set ``r`` is rank ``r`` alone; ``add`` creates others."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks = [np.arange(world_size, dtype=np.int64)]
        self._counts = [np.ones(world_size, np.int64)]
        self._columns: tuple[Int64, Int64] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._counts))

    def add(self, ranks: Int64, starts: Int64) -> Int64:
        """Return the numbers of the sets ``ranks[starts[i] : starts[i + 1]]``, each ascending.

        A single rank has its own number.
        """
        counts = starts[1:] - starts[:-1]
        numbers: Int64 = ranks[starts[:-1]].copy()
        many = np.flatnonzero(counts > 1)
        if len(many):
            numbers[many] = len(self) + np.arange(len(many))
            self._ranks.append(ranks[ragged_positions(starts[:-1][many], counts[many])])
            self._counts.append(counts[many])
            self._columns = None
        return numbers

    def columns(self) -> tuple[Int64, Int64]:
        """Return the ranks of all sets, and where each set begins among them."""
        if self._columns is None:
            self._columns = np.concatenate(self._ranks), ragged_starts(np.concatenate(self._counts))
        return self._columns

    def lowest(self, numbers: Int64) -> Int64:
        """The lowest rank of each of these sets."""
        ranks, starts = self.columns()
        return ranks[starts[numbers]]

    def are_single(self, numbers: Int64) -> Bool:
        """Whether each of these sets is a single rank."""
        single: Bool = numbers < self.world_size
        return single

    def sizes(self, numbers: Int64) -> Int64:
        """The number of ranks in each of these sets."""
        _, starts = self.columns()
        return starts[numbers + 1] - starts[numbers]

    def members(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the ranks of these sets one after the other, and the number of ranks in each."""
        ranks, starts = self.columns()
        counts = self.sizes(numbers)
        return ranks[ragged_positions(starts[numbers], counts)], counts


def distinct_sets(ranks: Int64, starts: Int64) -> tuple[Int64, Int64]:
    """Return the first set of each kind of equal sets, and the kind of every set.

    Sets are matched by a hash of their members, then compared member by member.
    """
    counts = starts[1:] - starts[:-1]
    if len(counts) == 0:
        return counts, counts
    begin = starts[:-1]
    digest = np.add.reduceat(_mix(ranks), begin) ^ _mix(counts)
    _, first, kind = np.unique(digest, return_index=True, return_inverse=True)
    first, kind = _split_off(first, kind, counts != counts[first[kind]])
    like = ranks[ragged_positions(begin[first[kind]], counts)]
    return _split_off(first, kind, np.logical_or.reduceat(ranks != like, begin))


def _split_off(first: Int64, kind: Int64, odd: Bool) -> tuple[Int64, Int64]:
    """Make a separate kind of each set whose hash collides with a different set's."""
    rows = np.flatnonzero(odd)
    kind[rows] = len(first) + np.arange(len(rows))
    return np.append(first, rows), kind


def _mix(values: Int64) -> npt.NDArray[np.uint64]:
    """Return well-spread 64-bit words (splitmix64), so that their sums distinguish sets."""
    word: npt.NDArray[np.uint64] = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word
