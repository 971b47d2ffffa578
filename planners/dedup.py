"""Find the rows of all ranks' shards that are the same box.

Every element of every tensor has a number: tensors one after the other, each in row-major order. A non-empty box is
identified by the numbers of its first and last element, so ragged rows compare as two integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..tensors.tables import BoxTable, Int64, TensorTable

Bool = npt.NDArray[np.bool_]
Rows: TypeAlias = "slice | Int64"

# Rows per step, so that temporary arrays stay in the cache.
_CHUNK = 1 << 18
_MAX_ELEMENTS = 2.0**62


@dataclass(eq=False)
class ElementNumbers:
    """By row of a ``BoxTable``: numbers of the ``first`` and ``last`` element, ``numel``, and whether it is ``inside``.

    ``first`` and ``last`` are undefined if ``numel`` is 0 or the box is not inside its tensor.
    """

    first: Int64
    last: Int64
    numel: Int64
    inside: Bool

    def take(self, rows: Int64) -> ElementNumbers:
        """Return these rows, in this order."""
        return ElementNumbers(self.first[rows], self.last[rows], self.numel[rows], self.inside[rows])


@dataclass(eq=False)
class Replicas:
    """Rows grouped by equal box.

    Group ``g`` is ``rows[starts[g] : starts[g + 1]]``, in the order of ``rank``. Groups are sorted by tensor, then
    offsets.
    """

    rows: Int64
    starts: Int64


def matrices(boxes: BoxTable, chunk: int = _CHUNK) -> Iterator[tuple[Rows, Int64, Int64]]:
    """Yield rows of equal ndim with offsets and lengths as ``[n, ndim]`` arrays, a bounded number at a time."""
    counts = boxes.starts[1:] - boxes.starts[:-1]
    if len(counts) == 0:
        return
    low, high = int(counts.min()), int(counts.max())
    for ndim in range(low, high + 1):
        if low == high:
            parts: Iterator[Rows] = (slice(i, min(i + chunk, len(counts))) for i in range(0, len(counts), chunk))
        else:
            rows = np.flatnonzero(counts == ndim)
            parts = (rows[i : i + chunk] for i in range(0, len(rows), chunk))
        for part in parts:
            if isinstance(part, slice):
                span = slice(part.start * ndim, part.stop * ndim)
                shape = (part.stop - part.start, ndim)
                yield part, boxes.offsets[span].reshape(shape), boxes.lengths[span].reshape(shape)
            else:
                where = boxes.starts[part][:, None] + np.arange(ndim)
                yield part, boxes.offsets[where], boxes.lengths[where]


def number_elements(tensors: TensorTable, boxes: BoxTable) -> ElementNumbers:
    """Number the elements of every tensor, and find those of each box. Raises ``PlanError`` beyond 2**62 elements."""
    strides, base = _strides(tensors)
    count = len(boxes)
    out = ElementNumbers(
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.bool_)
    )
    for rows, offsets, lengths in matrices(boxes):
        tensor = boxes.tensor[rows]
        where = tensors.starts[tensor]
        first = base[tensor]
        last = first.copy()
        numel = np.ones(len(tensor), np.int64)
        inside = np.ones(len(tensor), np.bool_)
        for axis in range(offsets.shape[1]):
            offset, length = offsets[:, axis], lengths[:, axis]
            size, stride = tensors.shape[where + axis], strides[where + axis]
            inside &= (offset >= 0) & (length >= 0) & (length <= size) & (offset <= size - length)
            first += offset * stride
            last += (offset + length - 1) * stride
            numel *= length
        out.first[rows], out.last[rows], out.numel[rows], out.inside[rows] = first, last, numel, inside
    return out


def group_replicas(numbers: ElementNumbers, rows: Int64, rank: Int64) -> Replicas:
    """Group ``rows`` by equal box.

    ``rows`` ascend; none is empty, and all are inside their tensors. ``rank`` is by row of the table.
    """
    every = len(rows) == len(numbers.first)
    first = numbers.first if every else numbers.first[rows]
    order = np.argsort(first, kind="stable")
    fresh = differs(first[order])
    again = np.flatnonzero(~fresh)
    if len(again):
        last, owner = (numbers.last, rank) if every else (numbers.last[rows], rank[rows])
        if (last[order[again]] != last[order[again - 1]]).any():
            # Boxes with the same first and different last elements overlap; the tiling check reports them.
            order = np.lexsort((owner, last, first))
            fresh = differs(first[order]) | differs(last[order])
        else:
            # Most boxes have one holder; only the others need sorting by rank.
            many = ~fresh
            many[:-1] |= many[1:]
            group = np.cumsum(fresh[many])
            order[many] = order[many][np.lexsort((owner[order[many]], group))]
    starts = np.append(np.flatnonzero(fresh), len(rows)).astype(np.int64, copy=False)
    return Replicas(order if every else rows[order], starts)


def differs(values: Int64) -> Bool:
    """By row, whether it is the first one or differs from the one before."""
    fresh = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=fresh[1:])
    return fresh


def _strides(tensors: TensorTable) -> tuple[Int64, Int64]:
    """Return row-major strides, ragged like ``shape``, and the number of each tensor's first element."""
    _reject_huge(tensors)
    strides = np.empty(len(tensors.shape), np.int64)
    step = np.ones(len(tensors), np.int64)
    for back in range(1, int(tensors.ndim.max(initial=0)) + 1):
        rows = np.flatnonzero(tensors.ndim >= back)
        where = tensors.starts[rows + 1] - back
        strides[where] = step[rows]
        step[rows] *= tensors.shape[where]
    base = np.zeros(len(tensors), np.int64)
    np.cumsum(step[:-1], out=base[1:])
    return strides, base


def _reject_huge(tensors: TensorTable) -> None:
    """Raise ``PlanError`` unless element numbers fit in 62 bits, which leaves room for sums."""
    bits = np.zeros(len(tensors))
    rows = np.repeat(np.arange(len(tensors)), tensors.ndim)
    np.add.at(bits, rows, np.log2(np.maximum(tensors.shape, 1)))
    bits[rows[tensors.shape == 0]] = -np.inf
    if len(bits) and np.exp2(np.minimum(bits, 100.0)).sum() > _MAX_ELEMENTS:
        largest = int(np.argmax(bits))
        raise PlanError(
            f"the tensors have more than 2**62 elements together; the largest is {tensors.names[largest]},"
            f" {tensors.meta_of(largest)}"
        )
