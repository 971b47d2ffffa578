"""Plan the reads of many ranges of many files, split parts of boxes into ranges, and cut what moves into runs.

Nearby ranges are read at once, and every byte only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..errors import PlanError
from ..tensors.geometry import Box, row_major_strides
from ..tensors.tables import Int64, ragged_positions, ragged_starts

T = TypeVar("T")


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
    for i, (low, high) in enumerate(zip(begin, end, strict=True)):
        if high - first > size or low - reach > gap:
            if i:
                starts.append(i)
            first = low
        reach = high
    starts.append(len(begin))
    return starts


def byte_span(inner: Box, outer: Box, itemsize: int) -> tuple[int, int]:
    """Return the bytes of ``inner`` in the row-major memory of ``outer``.

    Args:
        inner: A box, in global coordinates.
        outer: The box that contains it, in global coordinates.
        itemsize: Bytes per element.

    Returns:
        The first and one-past-last byte; ``(0, 0)`` for an empty box.

    Raises:
        PlanError: ``inner`` is not inside ``outer``.
    """
    if not outer.contains(inner):
        raise PlanError(f"box {inner} is not inside {outer}")
    if inner.numel == 0:
        return 0, 0
    strides = row_major_strides(outer.lengths)
    local = inner.relative_to(outer)
    first = sum(o * s for o, s in zip(local.offsets, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(local.offsets, local.lengths, strides, strict=True))
    return first * itemsize, (last + 1) * itemsize


def split_box(inner: Box, outer: Box, itemsize: int, max_bytes: int, gap_bytes: int) -> Iterator[Box]:
    """Split ``inner``, a part of the row-major stored box ``outer``, into sub-boxes to read one by one.

    The sub-boxes are disjoint, cover ``inner``, and come in storage order.

    Args:
        inner: The box to split, in global coordinates.
        outer: The stored box, in global coordinates.
        itemsize: Bytes per element.
        max_bytes: The largest ``byte_span`` of a sub-box; a single element may exceed it.
        gap_bytes: The largest gap between two neighbouring runs within a sub-box.

    Returns:
        The sub-boxes.

    Raises:
        PlanError: ``inner`` is not inside ``outer``, or a number is not valid.
    """
    if not outer.contains(inner):
        raise PlanError(f"box {inner} is not inside {outer}")
    if itemsize < 1 or max_bytes < 1 or gap_bytes < 0:
        raise PlanError(f"cannot split with itemsize {itemsize}, max_bytes {max_bytes}, gap_bytes {gap_bytes}")
    if inner.numel == 0:
        return iter(())
    strides = [stride * itemsize for stride in row_major_strides(outer.lengths)]
    # rest[d]: bytes spanned by one index of the dimensions before d, including all of dimension d and after.
    rest = [itemsize] * (inner.ndim + 1)
    # whole[d]: such a part can be read at once.
    whole = [True] * (inner.ndim + 1)
    for axis in reversed(range(inner.ndim)):
        length = inner.lengths[axis]
        rest[axis] = rest[axis + 1] + (length - 1) * strides[axis]
        dense = length == 1 or strides[axis] - rest[axis + 1] <= gap_bytes
        whole[axis] = whole[axis + 1] and dense and rest[axis] <= max_bytes
    return _cut(inner, 0, strides, rest, whole, max_bytes, gap_bytes)


def _cut(
    part: Box, axis: int, strides: list[int], rest: list[int], whole: list[bool], max_bytes: int, gap_bytes: int
) -> Iterator[Box]:
    if axis == part.ndim or whole[axis]:
        yield part
        return
    length = part.lengths[axis]
    step = 1
    if whole[axis + 1] and strides[axis] - rest[axis + 1] <= gap_bytes:
        step += max(0, (max_bytes - rest[axis + 1]) // strides[axis])
    for start in range(0, length, step):
        piece = part.narrow(axis, start, min(start + step, length))
        if step > 1 or whole[axis + 1]:
            yield piece
        else:
            yield from _cut(piece, axis + 1, strides, rest, whole, max_bytes, gap_bytes)


def runs_of(items: Iterable[T], nbytes_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Cut ``items`` into runs of at most ``limit`` bytes, and at least one item."""
    run: list[T] = []
    used = 0
    for item in items:
        nbytes = nbytes_of(item)
        if run and used + nbytes > limit:
            yield run
            run, used = [], 0
        run.append(item)
        used += nbytes
    if run:
        yield run
