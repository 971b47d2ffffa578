"""Plan the reads of many ranges of many files: nearby ranges are read at once, and every byte only once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...tensors.tables import Int64, ragged_positions, ragged_starts

__all__ = ["Extents", "plan_extents"]


@dataclass(eq=False)
class Extents:
    """Disjoint *blocks*, sorted by file and byte, grouped into *extents*: what one read fetches.

    Block ``i`` is bytes ``[begin[i], end[i])`` of ``file[i]``. The ranges with bytes in it, at least one, are
    ``uses[use_starts[i]:use_starts[i + 1]]``. Extent ``j`` consists of the blocks ``[starts[j], starts[j + 1])``, all
    of one file, and the bytes between them.
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
    """Return the extents for the ranges ``[begin, end)`` of ``file``, none of them empty.

    Ranges that overlap must have the same ``step``. A range is split only at multiples of its step from its begin (or
    from the begin of the range that it overlaps). A block has at most ``size`` bytes, or one step if that is longer; an
    extent has at most ``size + slack`` bytes, or one block. Blocks of one file that are at most ``gap`` bytes apart are
    read together.
    """
    if len(file) == 0:
        none = np.empty(0, np.int64)
        return Extents(none, none, none, np.zeros(1, np.int64), none, np.zeros(1, np.int64))
    order = np.lexsort((begin, file))
    # Map all files to one address space, with gaps between them that no extent spans.
    number = np.cumsum(np.append(False, np.diff(file[order]) != 0))
    base = number * (int(end.max()) + gap + 1)
    low, high = begin[order] + base, end[order] + base
    heads = np.flatnonzero(np.append(True, low[1:] >= np.maximum.accumulate(high)[:-1]))
    stop = np.maximum.reduceat(high, heads)
    length = np.maximum(size // step[order][heads], 1) * step[order][heads]
    counts = -(-(stop - low[heads]) // length)
    head = np.repeat(np.arange(len(heads)), counts)
    at = low[heads][head] + ragged_positions(np.zeros_like(counts), counts) * length[head]
    until = np.minimum(at + length[head], stop[head])
    first = np.searchsorted(at, low, side="right") - 1
    met = np.searchsorted(at, high, side="left") - first
    block = ragged_positions(first, met)
    sorted_by_block = np.argsort(block, kind="stable")
    base = base[heads][head]
    return Extents(
        file[order][heads][head],
        at - base,
        until - base,
        ragged_starts(np.bincount(block, minlength=len(at))),
        np.repeat(order, met)[sorted_by_block],
        np.array(_packed(at.tolist(), until.tolist(), size + slack, gap), np.int64),
    )


def _packed(begin: list[int], end: list[int], size: int, gap: int) -> list[int]:
    """Return the first block of each extent and, last, the number of blocks."""
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
