"""Proof that boxes tile their tensors: nothing twice, nothing missing. Faults are found for all tensors at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import PlanError
from ..geometry import Box, find_overlap, inseparable
from ..tables import BoxTable, Int64, TensorTable, ragged_starts
from .dedup import ElementNumbers, differs, matrices

__all__ = ["Describe", "first_uncovered", "tiling_faults"]

Describe = Callable[[int], str]
"""Says of a row of the box table who holds it."""

# Cuts tried before a missing region is only counted, not located.
_MAX_CUTS = 200_000
# Boxes looked at together: temporaries stay small beside the tables.
_CHUNK = 1 << 17


def first_uncovered(region: Box, offsets: Int64, lengths: Int64) -> Box | None:
    """The first part of ``region`` (as the boxes' own faces cut it) that no box, by row of ``[n, d]``, covers.

    None when all of it is covered. Boxes may overlap. Raises ``PlanError`` when the boxes are too many to tell.
    """
    if region.numel == 0:
        return None
    pending = [(region, np.arange(len(offsets), dtype=np.int64))]
    cuts = 0
    while pending:
        part, rows = pending.pop()
        starts, stops = offsets[rows], offsets[rows] + lengths[rows]
        low, high = np.array(part.offsets, np.int64), np.array(part.stops, np.int64)
        hit = ((starts < high) & (stops > low)).all(axis=1)
        rows, starts, stops = rows[hit], starts[hit], stops[hit]
        if len(rows) == 0:
            return part
        if ((starts <= low) & (stops >= high)).all(axis=1).any():
            continue
        cuts += 1
        if cuts > _MAX_CUTS:
            raise PlanError(f"cannot say which part of {region} is missing: {len(offsets)} boxes are too many")
        lower, upper = _cut(part, starts, stops)
        pending.append((upper, rows))
        pending.append((lower, rows))
    return None


def _cut(part: Box, starts: Int64, stops: Int64) -> tuple[Box, Box]:
    """Cut ``part`` along a face of a box that crosses it, on the first axis that has one, as evenly as can be."""
    for axis in range(part.ndim):
        low, high = part.offsets[axis], part.stops[axis]
        faces = np.concatenate((starts[:, axis], stops[:, axis]))
        faces = faces[(faces > low) & (faces < high)]
        if len(faces):
            faces = np.unique(faces)
            at = int(faces[len(faces) // 2])
            lengths = part.lengths
            lower = (*lengths[:axis], at - low, *lengths[axis + 1 :])
            upper = (*lengths[:axis], high - at, *lengths[axis + 1 :])
            moved = (*part.offsets[:axis], at, *part.offsets[axis + 1 :])
            return Box(part.offsets, lower), Box(moved, upper)
    raise AssertionError("a box that meets a region and does not cover it has a face inside it")


def tiling_faults(
    tensors: TensorTable, boxes: BoxTable, numbers: ElementNumbers, describe: Describe
) -> dict[int, list[str]]:
    """What keeps ``boxes`` from tiling their tensors: a list of faults by tensor row, empty when all is well.

    ``boxes`` are not empty, all inside their tensors, and sorted by ``numbers.first`` (that is by tensor, then
    offsets). A tensor without elements is always tiled.
    """
    faults: dict[int, list[str]] = defaultdict(list)
    bounds = np.searchsorted(boxes.tensor, np.arange(len(tensors) + 1))
    for tensor, fault in _overlap_faults(boxes, numbers, describe):
        faults[tensor].append(fault)
    running = ragged_starts(numbers.numel)
    missing = tensors.numel() - (running[bounds[1:]] - running[bounds[:-1]])
    # A tensor with an overlap may have a hole as well, whatever its boxes add up to.
    for tensor in sorted({*np.flatnonzero(missing > 0).tolist(), *faults}):
        hole = _hole_fault(tensors, boxes, tensor, int(bounds[tensor]), int(bounds[tensor + 1]))
        if hole:
            faults[tensor].append(hole)
    return dict(faults)


def _hole_fault(tensors: TensorTable, boxes: BoxTable, tensor: int, start: int, stop: int) -> str | None:
    whole = Box.whole(tensors.shape_of(tensor))
    if start == stop:
        return "no rank holds any of it" if whole.numel else None
    span = slice(int(boxes.starts[start]), int(boxes.starts[stop]))
    shape = (stop - start, whole.ndim)
    try:
        hole = first_uncovered(whole, boxes.offsets[span].reshape(shape), boxes.lengths[span].reshape(shape))
    except PlanError as error:
        return str(error)
    return None if hole is None else f"no rank holds {hole}"


def _overlap_faults(boxes: BoxTable, numbers: ElementNumbers, describe: Describe) -> Iterator[tuple[int, str]]:
    """One overlapping pair of each tensor that has any."""
    # Where each box ends before the next one begins in row-major order, all are disjoint: true of cuts along the first
    # axis and of flat ranges. The other tensors need a closer look.
    clash = (numbers.first[1:] <= numbers.last[:-1]) & (boxes.tensor[1:] == boxes.tensor[:-1])
    if not clash.any():
        return
    doubtful = np.zeros(int(boxes.tensor[-1]) + 1, np.bool_)
    doubtful[boxes.tensor[1:][clash]] = True
    for rows in _by_whole_tensors(np.flatnonzero(doubtful[boxes.tensor]), boxes.tensor):
        yield from _overlaps_of(boxes, rows, describe)


def _by_whole_tensors(rows: Int64, tensor: Int64) -> list[Int64]:
    """``rows``, which ascend, a bounded number at a time where no tensor has more."""
    begins = np.flatnonzero(differs(tensor[rows]))
    return np.split(rows, begins[1:][np.diff(begins // _CHUNK) > 0])


def _overlaps_of(boxes: BoxTable, rows: Int64, describe: Describe) -> Iterator[tuple[int, str]]:
    """One overlapping pair of each tensor that has any; ``rows`` are all those of their tensors."""
    part = boxes.take(rows)
    for index, offsets, lengths in matrices(part, chunk=len(part)):
        local = np.arange(len(part))[index]
        told: set[int] = set()
        for group in inseparable(offsets, lengths, part.tensor[local]):
            tensor = int(part.tensor[local[group[0]]])
            fault = None if tensor in told else _overlap_fault(boxes, rows[local], offsets, lengths, group, describe)
            if fault is not None:
                told.add(tensor)
                yield tensor, fault


def _overlap_fault(
    boxes: BoxTable, rows: Int64, offsets: Int64, lengths: Int64, group: Int64, describe: Describe
) -> str | None:
    try:
        pair = find_overlap(offsets[group], lengths[group])
    except PlanError as error:
        return str(error)
    if pair is None:
        return None
    a, b = sorted(int(rows[group[i]]) for i in pair)
    return f"{boxes.box_of(a)} of {describe(a)} overlaps {boxes.box_of(b)} of {describe(b)}"
