"""Arrange ranks in a tree: flat for small jobs, groups with a leader each for large ones. Pure arithmetic.

A group is a run of consecutive ranks, so ranks of one host are mostly in one group. The first rank of a group is its
leader. Rank 0 leads its own group and is the parent of all other leaders; a leader is the parent of its group. With n
ranks in groups of about sqrt(n), no rank has more than 2 sqrt(n) children. The *branch* of a rank is the rank itself
and everything below it, in order of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FLAT_UP_TO_RANKS = 64
_HOST_RANKS = 8  # a group size is a multiple of this, so that no host of 8 ranks (or a divisor of 8) is split


@dataclass(frozen=True)
class Tree:
    """Ranks 0 to ``world_size - 1`` in groups of ``group_size``. With one group, all ranks are children of rank 0."""

    world_size: int
    group_size: int

    @classmethod
    def of(cls, world_size: int, group_size: int | None = None) -> Tree:
        """Make a tree; every rank must pass the same arguments.

        Without ``group_size``, up to 64 ranks are flat and more are in groups of about the square root.
        """
        if group_size is None:
            group_size = world_size
            if world_size > _FLAT_UP_TO_RANKS:
                group_size = _HOST_RANKS * math.ceil(math.sqrt(world_size) / _HOST_RANKS)
        if world_size < 1 or group_size < 1:
            raise ValueError(f"{world_size} ranks cannot be in groups of {group_size}")
        return cls(world_size, min(group_size, world_size))

    def leader(self, rank: int) -> int:
        """Return the first rank of the group of ``rank``."""
        return rank - rank % self.group_size

    def parent(self, rank: int) -> int:
        """Return the rank one level up; rank 0 is its own parent."""
        leader = self.leader(rank)
        return 0 if leader == rank else leader

    def depth(self, rank: int) -> int:
        """Return the number of levels between ``rank`` and rank 0."""
        if rank == 0:
            return 0
        return 1 if self.parent(rank) == 0 else 2

    def children(self, rank: int) -> list[int]:
        """Return the ranks whose parent is ``rank``, in order."""
        if rank % self.group_size:
            return []
        members = list(range(rank + 1, min(rank + self.group_size, self.world_size)))
        return members if rank else members + list(range(self.group_size, self.world_size, self.group_size))

    def branch(self, rank: int) -> range:
        """Return ``rank`` and all ranks below it."""
        if rank == 0:
            return range(self.world_size)
        if rank % self.group_size:
            return range(rank, rank + 1)
        return range(rank, min(rank + self.group_size, self.world_size))
