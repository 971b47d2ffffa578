"""How to fetch many ranges of many files: which bytes lie together, and are read at once, each of them only once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..tables import Int64, ragged_positions, ragged_starts

__all__ = ["Extents", "plan_extents"]


@dataclass(eq=False)
class Extents:
    """Disjoint *blocks*, in the order of files and their bytes, packed into *extents*: what one read fetches.

    Block ``i`` is bytes ``[begin[i], end[i])`` of ``file[i]``; the ranges that have bytes in it, at least one, are
    ``uses[use_starts[i]:use_starts[i + 1]]``. Extent ``j`` is blocks ``[starts[j], starts[j + 1])``, all of one file,
    with what lies between them.
    """

    file: Int64
    begin: Int64
    end: Int64
    use_starts: Int64
    uses: Int64
    starts: Int64

    def __len__(self) -> int:
        return len(self.starts) - 1


def plan_extents(file: Int64, begin: Int64, end: Int64, step: Int64, *, size: int, slack: int, gap: int) -> Extents:
    """Extents for the ranges ``[begin, end)`` of ``file``, none of them empty.

    Ranges may overlap, where they have the same ``step``; a range is cut only at multiples of its step from its begin
    (or from that of the range that it overlaps). A block is at most ``size`` bytes long, or one step where that is
    longer; an extent at most ``size + slack``, or one block. Blocks that are up to ``gap`` bytes apart are read
    together.
    """
    if len(file) == 0:
        none = np.empty(0, np.int64)
        return Extents(none, none, none, np.zeros(1, np.int64), none, np.zeros(1, np.int64))
    order = np.lexsort((begin, file))
    # One line of addresses for all files, with room between them that nothing bridges.
    number = np.cumsum(np.append(False, np.diff(file[order]) != 0))
    base = number * (int(end.max()) + gap + 1)
    low, high = begin[order] + base, end[order] + base
    heads = np.flatnonzero(np.append(True, low[1:] >= np.maximum.accumulate(high)[:-1]))
    stop = np.maximum.reduceat(high, heads)
    length = np.maximum(size // step[order][heads], 1) * step[order][heads]
    counts = -(-(stop - low[heads]) // length)
    mine = np.repeat(np.arange(len(heads)), counts)
    at = low[heads][mine] + ragged_positions(np.zeros_like(counts), counts) * length[mine]
    until = np.minimum(at + length[mine], stop[mine])
    first = np.searchsorted(at, low, side="right") - 1
    met = np.searchsorted(at, high, side="left") - first
    block = ragged_positions(first, met)
    sorted_by_block = np.argsort(block, kind="stable")
    base = base[heads][mine]
    return Extents(
        file[order][heads][mine],
        at - base,
        until - base,
        ragged_starts(np.bincount(block, minlength=len(at))),
        np.repeat(order, met)[sorted_by_block],
        np.array(_packed(at.tolist(), until.tolist(), size + slack, gap), np.int64),
    )


def _packed(begin: list[int], end: list[int], size: int, gap: int) -> list[int]:
    """Where extents begin, and, last, the number of blocks."""
    starts = [0]
    first = begin[0]
    reach = end[0]
    for i, (low, high) in enumerate(zip(begin, end)):
        if high - first > size or low - reach > gap:
            if i:
                starts.append(i)
            first = low
        reach = high
    starts.append(len(begin))
    return starts
