"""Plan a load: intersect the requested boxes with the stored ones. Resharding needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import PlanError
from ...tensors.geometry import Box
from ...tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from ..coverage import first_uncovered

__all__ = ["LoadPlan", "plan_load"]

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
        return zip(self.requested.tolist(), self.stored.tolist(), self.boxes)


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
    of_few = np.repeat(few, sizes)
    found = [_Found.none()]
    found += _intersect_all(
        stored, requested, order[of_few], np.repeat(low[few], sizes[few]), np.repeat((high - low)[few], sizes[few])
    )
    left = ~few
    left[np.searchsorted(names, requested.tensor[_find_incomplete(requested, order[of_few], found)])] = True
    faults: list[str] = []
    for tensor, begin, size, first, last in zip(
        *(column[left].tolist() for column in (names, begins, sizes, low, high))
    ):
        rows = order[begin : begin + size]
        one = _OneTensor(stored, first, last, requested, rows)
        hits = list(one.intersections())
        found.extend(hits)
        fault = one.fault(hits)
        if fault:
            faults.append(f"{tensors.names[tensor]}: {fault}")
    if faults:
        raise PlanError("the stored boxes do not cover what is requested:\n  " + "\n  ".join(faults))
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


def _intersect_all(stored: BoxTable, requested: BoxTable, rows: Int64, low: Int64, counts: Int64) -> Iterator[_Found]:
    """Yield every intersection of the requested ``rows`` with the ``counts`` stored boxes from ``low`` on."""
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
            rows_stored = ragged_positions(low[some], counts[some])
            begin, extent = _matrix(requested, rows_requested, ndim)
            start, size = _matrix(stored, rows_stored, ndim)
            offsets = np.maximum(begin, start)
            lengths = np.minimum(begin + extent, start + size) - offsets
            hit = np.flatnonzero((lengths > 0).all(axis=1))
            yield _Found(rows_requested[hit], rows_stored[hit], offsets[hit], lengths[hit])
            at = to


def _find_incomplete(requested: BoxTable, rows: Int64, found: list[_Found]) -> Int64:
    """Return those of the requested ``rows`` whose intersections do not add up to the box."""
    missing = np.zeros(len(requested), np.int64)
    missing[rows] = requested.numel()[rows]
    for part in found:
        np.subtract.at(missing, part.requested, part.lengths.prod(axis=1))
    return np.flatnonzero(missing)


class _OneTensor:
    """The boxes of one tensor that has many boxes or a fault."""

    def __init__(self, stored: BoxTable, first: int, last: int, requested: BoxTable, rows: Int64) -> None:
        # There is at least one requested row, but there may be no stored one.
        ndim = int(requested.starts[rows[0] + 1] - requested.starts[rows[0]])
        self.rows = rows
        self.first = first
        self.begin, lengths = _matrix(requested, rows, ndim)
        self.end = self.begin + lengths
        self.numel = lengths.prod(axis=1)
        self.start, lengths = _matrix(stored, np.arange(first, last, dtype=np.int64), ndim)
        self.stop = self.start + lengths

    def intersections(self) -> Iterator[_Found]:
        """Yield every intersection, a bounded number of pairs at a time."""
        low, high, order = self._candidates()
        counts = high - low
        total = np.cumsum(counts)
        at = 0
        while at < len(counts):
            done = int(total[at - 1]) if at else 0
            to = max(at + 1, int(np.searchsorted(total, done + _MAX_PAIRS, side="right")))
            yield from self._pairs(low[at:to], counts[at:to], at, order)
            at = to

    def _candidates(self) -> tuple[Int64, Int64, Int64]:
        """Return, for each requested box, the slice ``[low, high)`` of stored boxes that may intersect it.

        The slices refer to the stored boxes in the order that is returned last.
        """
        count = len(self.start)
        order = np.arange(count, dtype=np.int64)
        ndim = self.start.shape[1]
        if ndim == 0 or count * len(self.rows) <= _FEW_PAIRS:
            return np.zeros(len(self.rows), np.int64), np.full(len(self.rows), count, np.int64), order
        axis = int(np.argmax([len(np.unique(self.start[:, axis])) for axis in range(ndim)]))
        order = np.argsort(self.start[:, axis], kind="stable")
        reach = np.maximum.accumulate(self.stop[order, axis])
        low = np.searchsorted(reach, self.begin[:, axis], side="right")
        high = np.searchsorted(self.start[order, axis], self.end[:, axis], side="left")
        return low, np.maximum(low, high), order

    def _pairs(self, low: Int64, counts: Int64, at: int, order: Int64) -> Iterator[_Found]:
        rows_requested = np.repeat(np.arange(at, at + len(counts)), counts)
        rows_stored = order[ragged_positions(low, counts)]
        offsets = np.maximum(self.begin[rows_requested], self.start[rows_stored])
        lengths = np.minimum(self.end[rows_requested], self.stop[rows_stored]) - offsets
        hit = np.flatnonzero((lengths > 0).all(axis=1))
        if len(hit):
            yield _Found(self.rows[rows_requested[hit]], self.first + rows_stored[hit], offsets[hit], lengths[hit])

    def fault(self, found: list[_Found]) -> str | None:
        """Describe the first incomplete requested box and its missing part; None if all boxes are complete."""
        missing = self.numel.copy()
        for part in found:
            # The rows of one tensor ascend, because they were selected by a stable sort.
            np.subtract.at(missing, np.searchsorted(self.rows, part.requested), part.lengths.prod(axis=1))
        short = np.flatnonzero(missing).tolist()
        if not short:
            return None
        index = short[0]
        box = Box(tuple(self.begin[index].tolist()), tuple((self.end - self.begin)[index].tolist()))
        more = f" (and {len(short) - 1} more requested boxes)" if len(short) > 1 else ""
        return f"requested {box}, {self._first_missing(box)}{more}"

    def _first_missing(self, box: Box) -> str:
        if len(self.start) == 0:
            return "of which nothing is stored"
        try:
            hole = first_uncovered(box, self.start, self.stop - self.start)
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
