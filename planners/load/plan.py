"""What to read for what is wanted: wanted boxes x stored boxes. Resharding is this one function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..geometry import Box
from ..tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from .coverage import first_uncovered

__all__ = ["LoadPlan", "plan_load"]

# Pairs compared at once; bounds temporaries to some tens of MB.
_MAX_PAIRS = 1 << 19
# Below this many pairs a tensor is not worth pruning.
_FEW_PAIRS = 1 << 12


@dataclass(eq=False)
class LoadPlan:
    """Row ``i`` moves ``boxes`` ``i`` (global coordinates, never empty) from row ``stored[i]`` of the stored boxes to
    row ``wanted[i]`` of the wanted ones. Rows come in the order of ``wanted``, then ``stored``."""

    wanted: Int64
    stored: Int64
    boxes: BoxTable

    def __len__(self) -> int:
        return len(self.wanted)

    def pieces(self) -> Iterator[tuple[int, int, Box]]:
        """``(wanted row, stored row, box)`` of every row."""
        return zip(self.wanted.tolist(), self.stored.tolist(), self.boxes)


def plan_load(tensors: TensorTable, stored: BoxTable, wanted: BoxTable) -> LoadPlan:
    """Intersect every wanted box with the stored ones of its tensor, and prove that nothing of it is missing.

    ``stored`` is sorted by tensor and known to be disjoint (a manifest's and a save plan's boxes are); ``wanted`` is
    in any order and may overlap. Raises one ``PlanError`` that names every tensor of which a wanted part is not
    stored, and the first such part.
    """
    if len(stored) and (stored.tensor[1:] < stored.tensor[:-1]).any():
        raise PlanError("stored boxes are not sorted by tensor")
    if (wanted.starts[1:] - wanted.starts[:-1] != tensors.ndim[wanted.tensor]).any():
        raise PlanError("a wanted box has not as many dimensions as its tensor")
    order = np.argsort(wanted.tensor, kind="stable")
    order = order[wanted.numel()[order] > 0]
    names, begins, sizes = np.unique(wanted.tensor[order], return_index=True, return_counts=True)
    low = np.searchsorted(stored.tensor, names)
    high = np.searchsorted(stored.tensor, names, side="right")
    few = (high - low) * sizes <= _FEW_PAIRS
    of_few = np.repeat(few, sizes)
    found = [_Found.none()]
    found += _in_one_pass(
        stored, wanted, order[of_few], np.repeat(low[few], sizes[few]), np.repeat((high - low)[few], sizes[few])
    )
    left = ~few
    left[np.searchsorted(names, wanted.tensor[_short(wanted, order[of_few], found)])] = True
    faults: list[str] = []
    for tensor, begin, size, first, last in zip(
        *(column[left].tolist() for column in (names, begins, sizes, low, high))
    ):
        rows = order[begin : begin + size]
        one = _OneTensor(stored, first, last, wanted, rows)
        hits = list(one.intersections())
        found.extend(hits)
        fault = one.fault(hits)
        if fault:
            faults.append(f"{tensors.names[tensor]}: {fault}")
    if faults:
        raise PlanError("stored boxes do not cover what is wanted:\n  " + "\n  ".join(faults))
    return _join(wanted, found)


@dataclass(eq=False)
class _Found:
    """Intersections of one tensor's boxes: rows of the two tables, and the common parts as ``[n, ndim]``."""

    wanted: Int64
    stored: Int64
    offsets: Int64
    lengths: Int64

    @classmethod
    def none(cls) -> _Found:
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty.reshape(0, 0), empty.reshape(0, 0))


def _in_one_pass(stored: BoxTable, wanted: BoxTable, rows: Int64, low: Int64, counts: Int64) -> Iterator[_Found]:
    """Every common part of wanted ``rows``, of any tensors, with the ``counts`` stored boxes from ``low`` on."""
    ndims = wanted.starts[rows + 1] - wanted.starts[rows]
    for ndim in np.unique(ndims).tolist():
        pick = np.flatnonzero(ndims == ndim)
        total = np.cumsum(counts[pick])
        at = 0
        while at < len(pick):
            done = int(total[at - 1]) if at else 0
            to = max(at + 1, int(np.searchsorted(total, done + _MAX_PAIRS, side="right")))
            some = pick[at:to]
            mine = np.repeat(rows[some], counts[some])
            theirs = ragged_positions(low[some], counts[some])
            begin, extent = _matrix(wanted, mine, ndim)
            start, size = _matrix(stored, theirs, ndim)
            offsets = np.maximum(begin, start)
            lengths = np.minimum(begin + extent, start + size) - offsets
            hit = np.flatnonzero((lengths > 0).all(axis=1))
            yield _Found(mine[hit], theirs[hit], offsets[hit], lengths[hit])
            at = to


def _short(wanted: BoxTable, rows: Int64, found: list[_Found]) -> Int64:
    """Those of the wanted ``rows`` whose common parts do not add up to the box."""
    missing = np.zeros(len(wanted), np.int64)
    missing[rows] = wanted.numel()[rows]
    for part in found:
        np.subtract.at(missing, part.wanted, part.lengths.prod(axis=1))
    return np.flatnonzero(missing)


class _OneTensor:
    """The boxes of one tensor that has many, or a fault."""

    def __init__(self, stored: BoxTable, first: int, last: int, wanted: BoxTable, rows: Int64) -> None:
        # At least one wanted row, but maybe no stored one.
        ndim = int(wanted.starts[rows[0] + 1] - wanted.starts[rows[0]])
        self.rows = rows
        self.first = first
        self.begin, lengths = _matrix(wanted, rows, ndim)
        self.end = self.begin + lengths
        self.numel = lengths.prod(axis=1)
        self.start, lengths = _matrix(stored, np.arange(first, last, dtype=np.int64), ndim)
        self.stop = self.start + lengths

    def intersections(self) -> Iterator[_Found]:
        """Every common part, a bounded number of pairs at a time."""
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
        """For each wanted box the slice ``[low, high)`` of stored boxes, in the order returned, with all it meets."""
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
        mine = np.repeat(np.arange(at, at + len(counts)), counts)
        theirs = order[ragged_positions(low, counts)]
        offsets = np.maximum(self.begin[mine], self.start[theirs])
        lengths = np.minimum(self.end[mine], self.stop[theirs]) - offsets
        hit = np.flatnonzero((lengths > 0).all(axis=1))
        if len(hit):
            yield _Found(self.rows[mine[hit]], self.first + theirs[hit], offsets[hit], lengths[hit])

    def fault(self, found: list[_Found]) -> str | None:
        """Says of the first wanted box that is not all there which part is missing."""
        missing = self.numel.copy()
        for part in found:
            # Rows of one tensor ascend: the sort that picked them was stable.
            np.subtract.at(missing, np.searchsorted(self.rows, part.wanted), part.lengths.prod(axis=1))
        short = np.flatnonzero(missing).tolist()
        if not short:
            return None
        index = short[0]
        box = Box(tuple(self.begin[index].tolist()), tuple((self.end - self.begin)[index].tolist()))
        more = f" (and {len(short) - 1} more wanted boxes)" if len(short) > 1 else ""
        return f"wanted {box}, {self._first_missing(box)}{more}"

    def _first_missing(self, box: Box) -> str:
        if len(self.start) == 0:
            return "of which nothing is stored"
        try:
            hole = first_uncovered(box, self.start, self.stop - self.start)
        except PlanError as error:
            return str(error)
        return "but stored boxes overlap there" if hole is None else f"of which {hole} is not stored"


def _matrix(boxes: BoxTable, rows: Int64, ndim: int) -> tuple[Int64, Int64]:
    """Offsets and lengths of rows of one ndim, as ``[n, ndim]``."""
    where = boxes.starts[rows][:, None] + np.arange(ndim)
    return boxes.offsets[where], boxes.lengths[where]


def _join(wanted: BoxTable, found: list[_Found]) -> LoadPlan:
    rows = np.concatenate([part.wanted for part in found])
    stored = np.concatenate([part.stored for part in found])
    counts = wanted.starts[rows + 1] - wanted.starts[rows]
    boxes = BoxTable(
        wanted.tensor[rows],
        np.concatenate([part.offsets.reshape(-1) for part in found]),
        np.concatenate([part.lengths.reshape(-1) for part in found]),
        ragged_starts(counts),
    )
    order = np.lexsort((stored, rows))
    return LoadPlan(rows[order], stored[order], boxes.take(order))
