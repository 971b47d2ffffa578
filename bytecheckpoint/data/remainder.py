"""Which positions of an epoch's global order are left, and how ranks divide them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Remainder"]


@dataclass(frozen=True)
class Remainder:
    """The positions that no rank has consumed: those in ``behind``, and then all from ``position`` to ``size - 1``.

    ``behind`` holds increasing positions below ``position``. It is empty as long as all ranks consume equally many.
    Rank ``r`` of ``n`` gets every n-th of these positions, beginning with the r-th.
    """

    size: int
    position: int = 0
    behind: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        steps = (-1, *self.behind, self.position)
        increasing = all(a < b for a, b in pairwise(steps))
        if not increasing or self.position > self.size:
            raise ValueError(f"{list(self.behind)} and {self.position} are not increasing positions below {self.size}")

    def __len__(self) -> int:
        return len(self.behind) + self.size - self.position

    def __getitem__(self, index: int) -> int:
        """The position at ``index`` of those that are left."""
        ahead = index - len(self.behind)
        return self.behind[index] if ahead < 0 else self.position + ahead

    def share(self, rank: int, world_size: int, *, drop_last: bool = False) -> int:
        """How many of these positions a rank gets. With ``drop_last``, every rank gets equally many."""
        return len(self) // world_size if drop_last else max(0, -(-(len(self) - rank) // world_size))

    def without(self, consumed: Sequence[int]) -> Remainder:
        """What is left after each rank has consumed so many of its positions."""
        world_size = len(consumed)
        begin = min(consumed) * world_size
        end = min(max(consumed) * world_size, len(self))
        left = [self[index] for index in range(begin, end) if index // world_size >= consumed[index % world_size]]
        passed = max(0, end - len(self.behind))
        return Remainder(self.size, self.position + passed, (*left, *self.behind[end:]))
