"""Plan a load: intersect the requested boxes with the stored ones. Resharding needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..tensors.geometry import Box
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .coverage import first_uncovered

# Pairs that are compared at once; bounds temporary arrays to some tens of MB.
_MAX_PAIRS = 1 << 19
# A tensor with fewer pairs is not worth pruning.
_FEW_PAIRS = 1 << 12


@dataclass(eq=False)
class LoadPlan:
    """The parts that a load moves, sorted by requested row, then stored row.

    Attributes:
        requested: The row of the requested boxes that receives a part.
        stored: The row of the stored boxes from which it comes.
        boxes: The part, in global coordinates; never empty.
    """

    requested: Int64
    stored: Int64
    boxes: BoxTable

    def __len__(self) -> int:
        return len(self.requested)

    def rows(self) -> Iterator[tuple[int, int, Box]]:
        """Iterate over the parts.

        Returns:
            An iterator of requested row, stored row and box.
        """
        return zip(self.requested.tolist(), self.stored.tolist(), self.boxes, strict=True)


def plan_load(tensors: TensorTable, stored: BoxTable, requested: BoxTable) -> LoadPlan:
    """Intersect every requested box with the stored boxes of its tensor, and check that nothing is missing.

    Args:
        tensors: The tensors that both tables refer to.
        stored: The stored boxes, disjoint and sorted by tensor, as in a manifest or a save plan.
        requested: The requested boxes, in any order. They may overlap.

    Returns:
        The parts to move.

    Raises:
        PlanError: Part of a requested box is not stored. The message names every such tensor and its first missing
            part.
    """
    if len(stored) and (stored.tensor[1:] < stored.tensor[:-1]).any():
        raise PlanError("stored boxes are not sorted by tensor")
    if (requested.starts[1:] - requested.starts[:-1] != tensors.ndim[requested.tensor]).any():
        raise PlanError("a requested box and its tensor have different numbers of dimensions")
    order = np.argsort(requested.tensor, kind="stable")
    order = order[requested.numel()[order] > 0]
    names, begins, sizes = np.unique(requested.tensor[order], return_index=True, return_counts=True)
    low = np.searchsorted(stored.tensor, names)
    high = np.searchsorted(stored.tensor, names, side="right")
    few = (high - low) * sizes <= _FEW_PAIRS
    of_few = order[np.repeat(few, sizes)]
    every = np.arange(len(stored), dtype=np.int64)
    found = [_Found.none()]
    found += _intersect(
        stored, requested, of_few, np.repeat(low[few], sizes[few]), np.repeat((high - low)[few], sizes[few]), every
    )
    for begin, size, first, last in zip(*(column[~few].tolist() for column in (begins, sizes, low, high)), strict=True):
        rows = order[begin : begin + size]
        found += _intersect(stored, requested, rows, *_candidates(stored, first, last, requested, rows))
    _reject_missing(tensors, stored, requested, found)
    return _join(requested, found)


@dataclass(eq=False)
class _Found:
    """Intersections of boxes: rows of the two tables, and the common parts as ``[n, ndim]``."""

    requested: Int64
    stored: Int64
    offsets: Int64
    lengths: Int64

    @classmethod
    def none(cls) -> _Found:
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty.reshape(0, 0), empty.reshape(0, 0))


def _candidates(
    stored: BoxTable, first: int, last: int, requested: BoxTable, rows: Int64
) -> tuple[Int64, Int64, Int64]:
    """Find the stored boxes ``[first, last)`` of one tensor that may intersect each of the requested ``rows``.

    Returns what ``_intersect`` takes: they are ``order[low : low + count]`` for the numbers of each row.
    """
    order = np.arange(first, last, dtype=np.int64)
    ndim = int(requested.starts[rows[0] + 1] - requested.starts[rows[0]])
    if ndim == 0:
        return np.zeros(len(rows), np.int64), np.full(len(rows), len(order), np.int64), order
    begin, extent = _matrix(requested, rows, ndim)
    start, size = _matrix(stored, order, ndim)
    axis = int(np.argmax([len(np.unique(start[:, axis])) for axis in range(ndim)]))
    by_start = np.argsort(start[:, axis], kind="stable")
    reach = np.maximum.accumulate((start + size)[by_start, axis])
    low = np.searchsorted(reach, begin[:, axis], side="right")
    high = np.searchsorted(start[by_start, axis], (begin + extent)[:, axis], side="left")
    return low, np.maximum(high - low, 0), order[by_start]


def _intersect(
    stored: BoxTable, requested: BoxTable, rows: Int64, low: Int64, counts: Int64, order: Int64
) -> Iterator[_Found]:
    """Yield every intersection of the requested ``rows`` with the stored boxes ``order[low : low + counts]`` of each.

    A bounded number of pairs is compared at a time.
    """
    ndims = requested.starts[rows + 1] - requested.starts[rows]
    for ndim in np.unique(ndims).tolist():
        pick = np.flatnonzero(ndims == ndim)
        total = np.cumsum(counts[pick])
        at = 0
        while at < len(pick):
            done = int(total[at - 1]) if at else 0
            to = max(at + 1, int(np.searchsorted(total, done + _MAX_PAIRS, side="right")))
            some = pick[at:to]
            rows_requested = np.repeat(rows[some], counts[some])
            rows_stored = order[ragged_positions(low[some], counts[some])]
            begin, extent = _matrix(requested, rows_requested, ndim)
            start, size = _matrix(stored, rows_stored, ndim)
            offsets = np.maximum(begin, start)
            lengths = np.minimum(begin + extent, start + size) - offsets
            hit = np.flatnonzero((lengths > 0).all(axis=1))
            yield _Found(rows_requested[hit], rows_stored[hit], offsets[hit], lengths[hit])
            at = to


def _reject_missing(tensors: TensorTable, stored: BoxTable, requested: BoxTable, found: list[_Found]) -> None:
    """Raise ``PlanError`` if the intersections of a requested box do not add up to it.

    The message names, for each such tensor, its first incomplete box and the missing part.
    """
    missing = requested.numel()
    for part in found:
        np.subtract.at(missing, part.requested, part.lengths.prod(axis=1))
    short = np.flatnonzero(missing)
    if len(short) == 0:
        return
    faults: list[str] = []
    for tensor, first, count in zip(
        *np.unique(requested.tensor[short], return_index=True, return_counts=True), strict=True
    ):
        box = requested.box_of(int(short[first]))
        more = f" (and {count - 1} more requested boxes)" if count > 1 else ""
        faults.append(f"{tensors.names[tensor]}: requested {box}, {_first_missing(stored, int(tensor), box)}{more}")
    raise PlanError("the stored boxes do not cover what is requested:\n  " + "\n  ".join(faults))


def _first_missing(stored: BoxTable, tensor: int, box: Box) -> str:
    rows = np.flatnonzero(stored.tensor == tensor)
    if len(rows) == 0:
        return "of which nothing is stored"
    try:
        hole = first_uncovered(box, *_matrix(stored, rows, box.ndim))
    except PlanError as error:
        return str(error)
    return "but stored boxes overlap there" if hole is None else f"of which {hole} is not stored"


def _matrix(boxes: BoxTable, rows: Int64, ndim: int) -> tuple[Int64, Int64]:
    """Return offsets and lengths of rows of the same ndim, as ``[n, ndim]``."""
    where = boxes.starts[rows][:, None] + np.arange(ndim)
    return boxes.offsets[where], boxes.lengths[where]


def _join(requested: BoxTable, found: list[_Found]) -> LoadPlan:
    rows = np.concatenate([part.requested for part in found])
    stored = np.concatenate([part.stored for part in found])
    counts = requested.starts[rows + 1] - requested.starts[rows]
    boxes = BoxTable(
        requested.tensor[rows],
        np.concatenate([part.offsets.reshape(-1) for part in found]),
        np.concatenate([part.lengths.reshape(-1) for part in found]),
        ragged_starts(counts),
    )
    order = np.lexsort((stored, rows))
    return LoadPlan(rows[order], stored[order], boxes.take(order))
