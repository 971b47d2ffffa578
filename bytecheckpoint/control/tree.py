"""Who talks to whom: flat in small jobs, in groups with a leader each in large ones. Pure arithmetic.

Groups are runs of consecutive ranks, so that mostly those of the same hosts are together. The first rank of each is its
leader, and rank 0 leads its own group and the leaders. A rank that others report to serves a store for them: its
*children*; theirs is their *parent*. With n ranks in groups of about the square root of n, no rank has more than
two roots of n children. What a rank hands up or gets down is that of its whole *branch*, itself first, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Tree"]

_FLAT_UP_TO = 64
_HOST_RANKS = 8  # groups are a multiple of this, so that hosts with so many ranks, or a divisor, are never split


@dataclass(frozen=True)
class Tree:
    """Ranks 0 to ``world_size - 1`` in groups of ``group_size``; one group is a flat job, where all are rank 0's
    children."""

    world_size: int
    group_size: int

    @classmethod
    def of(cls, world_size: int, group_size: int | None = None) -> Tree:
        """Flat up to 64 ranks, then groups of about the square root; unless told. Every rank must be told the same."""
        if group_size is None:
            group_size = world_size
            if world_size > _FLAT_UP_TO:
                group_size = _HOST_RANKS * math.ceil(math.sqrt(world_size) / _HOST_RANKS)
        if world_size < 1 or group_size < 1:
            raise ValueError(f"{world_size} ranks cannot be in groups of {group_size}")
        return cls(world_size, min(group_size, world_size))

    def leader(self, rank: int) -> int:
        """The first rank of the group."""
        return rank - rank % self.group_size

    def parent(self, rank: int) -> int:
        """Whose store this rank uses; of rank 0, its own."""
        leader = self.leader(rank)
        return 0 if leader == rank else leader

    def store_of_group(self, rank: int) -> int:
        """Who serves the store that the whole group uses, its leader included."""
        leader = self.leader(rank)
        return leader if len(self.branch(leader)) > 1 else 0

    def depth(self, rank: int) -> int:
        """How many stores away rank 0 is."""
        if rank == 0:
            return 0
        return 1 if self.parent(rank) == 0 else 2

    def children(self, rank: int) -> list[int]:
        """Who uses this rank's store, in order; empty for those that serve none."""
        if rank % self.group_size:
            return []
        own = list(range(rank + 1, min(rank + self.group_size, self.world_size)))
        return own if rank else own + self.leaders()

    def child_count(self, rank: int) -> int:
        """How many children that are."""
        if rank % self.group_size:
            return 0
        own = min(self.group_size, self.world_size - rank) - 1
        return own if rank else own + (self.world_size - 1) // self.group_size

    def branch(self, rank: int) -> range:
        """The rank itself and all below it."""
        if rank == 0:
            return range(self.world_size)
        if rank % self.group_size:
            return range(rank, rank + 1)
        return range(rank, min(rank + self.group_size, self.world_size))

    def leaders(self) -> list[int]:
        """The first ranks of all groups but rank 0's."""
        return list(range(self.group_size, self.world_size, self.group_size))

    def servers(self) -> list[int]:
        """The leaders that have someone to serve a store for."""
        return [leader for leader in self.leaders() if len(self.branch(leader)) > 1]
