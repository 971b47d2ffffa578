"""Check that boxes tile their tensors: no element is held twice or missing. All tensors are checked at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import PlanError
from ..tensors.geometry import Box, find_overlap, inseparable
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_starts
from .dedup import ElementNumbers, differs, matrices

Describe = Callable[[int], str]
"""Returns a text that names the ranks that hold a row of the box table."""

# Splits after which a missing region is reported without its location.
_MAX_SPLITS = 200_000
# Boxes per step, so that temporary arrays stay small compared with the tables.
_CHUNK = 1 << 17


def first_uncovered(region: Box, offsets: Int64, lengths: Int64) -> Box | None:
    """Return the first part of ``region`` that no box covers, or None if the boxes cover all of it.

    The boxes are rows of ``[n, d]`` arrays and may overlap. A part is bounded by faces of boxes. Raises ``PlanError``
    if there are too many boxes to locate a part.
    """
    if region.numel == 0:
        return None
    pending = [(region, np.arange(len(offsets), dtype=np.int64))]
    splits = 0
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
        splits += 1
        if splits > _MAX_SPLITS:
            raise PlanError(f"part of {region} is missing; {len(offsets)} boxes are too many to locate it")
        lower, upper = _split(part, starts, stops)
        pending.append((upper, rows))
        pending.append((lower, rows))
    return None


def _split(part: Box, starts: Int64, stops: Int64) -> tuple[Box, Box]:
    """Split ``part`` near its middle, along a face of a box, on the first axis that a face crosses."""
    for axis in range(part.ndim):
        low, high = part.offsets[axis], part.stops[axis]
        faces = np.concatenate((starts[:, axis], stops[:, axis]))
        faces = faces[(faces > low) & (faces < high)]
        if len(faces):
            faces = np.unique(faces)
            middle = int(faces[len(faces) // 2]) - low
            return part.narrow(axis, 0, middle), part.narrow(axis, middle, high - low)
    raise AssertionError("a box that meets a region and does not cover it has a face inside it")


def tiling_faults(
    tensors: TensorTable, boxes: BoxTable, numbers: ElementNumbers, describe: Describe
) -> dict[int, list[str]]:
    """Return what keeps ``boxes`` from tiling their tensors: a list of faults by tensor row, empty if they do.

    ``boxes`` are not empty, lie inside their tensors, and are sorted by ``numbers.first`` (by tensor, then offsets). A
    tensor without elements counts as tiled.
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
    """Yield one overlapping pair of each tensor that has any."""
    # If each box ends before the next one begins in row-major order, all are disjoint. This holds for splits along the
    # first axis and for flat ranges; the other tensors need a closer check.
    clash = (numbers.first[1:] <= numbers.last[:-1]) & (boxes.tensor[1:] == boxes.tensor[:-1])
    if not clash.any():
        return
    doubtful = np.zeros(int(boxes.tensor[-1]) + 1, np.bool_)
    doubtful[boxes.tensor[1:][clash]] = True
    for rows in _by_whole_tensors(np.flatnonzero(doubtful[boxes.tensor]), boxes.tensor):
        yield from _overlaps_of(boxes, rows, describe)


def _by_whole_tensors(rows: Int64, tensor: Int64) -> list[Int64]:
    """Split ``rows``, which ascend, into groups of bounded size, without splitting a tensor."""
    begins = np.flatnonzero(differs(tensor[rows]))
    return np.split(rows, begins[1:][np.diff(begins // _CHUNK) > 0])


def _overlaps_of(boxes: BoxTable, rows: Int64, describe: Describe) -> Iterator[tuple[int, str]]:
    """Yield one overlapping pair of each tensor that has any; ``rows`` are all rows of their tensors."""
    part = boxes.take(rows)
    for index, offsets, lengths in matrices(part, chunk=len(part)):
        local = np.arange(len(part))[index]
        reported: set[int] = set()
        for group in inseparable(offsets, lengths, part.tensor[local]):
            tensor = int(part.tensor[local[group[0]]])
            fault = (
                None if tensor in reported else _overlap_fault(boxes, rows[local], offsets, lengths, group, describe)
            )
            if fault is not None:
                reported.add(tensor)
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
