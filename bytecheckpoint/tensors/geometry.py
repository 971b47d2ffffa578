"""The algebra of n-dimensional boxes, in which tensors, shards, plans and reads are described.

A box is a half-open range per dimension, in global coordinates. A 0-d tensor has exactly one box, with no dimensions
and one element. This module does not deal with dtypes, bytes, ranks or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PlanError

Int64 = npt.NDArray[np.int64]

# Boxes that no axis separates are compared pair by pair. Real tilings leave a handful, so more are rejected.
_MAX_PAIRWISE = 4096


class _Ranges(NamedTuple):
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Box(_Ranges):
    """A box of a tensor: in each dimension ``d``, the indices from ``offsets[d]`` to ``offsets[d] + lengths[d] - 1``.

    Boxes are immutable, hashable, and ordered by offsets. The box of a 0-d tensor has no dimensions and one element.

    Args:
        offsets: The first index in each dimension, in elements.
        lengths: The number of indices in each dimension; 0 makes the box empty.

    Raises:
        PlanError: A number is negative, or the two tuples have different lengths.

    Example:
        >>> box = Box((2, 0), (4, 8))                      # rows 2 to 5 of a tensor with eight columns
        >>> box.intersect(Box((4, 0), (4, 8)))
        Box(offsets=(4, 0), lengths=(2, 8))
    """

    # A tuple, because hundreds of thousands of boxes are created and compared.
    __slots__ = ()

    def __new__(cls, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Box:
        """Create a box. Raises ``PlanError`` if the numbers do not form one."""
        if len(offsets) != len(lengths) or (offsets and (min(offsets) < 0 or min(lengths) < 0)):
            raise PlanError(f"not a box: offsets {offsets}, lengths {lengths}")
        return tuple.__new__(cls, (offsets, lengths))

    @classmethod
    def unchecked(cls, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Box:
        """Create a box without validation, from numbers that were computed from valid boxes or checked in bulk.

        Args:
            offsets: As in the constructor.
            lengths: As in the constructor.

        Returns:
            The box.
        """
        return tuple.__new__(cls, (offsets, lengths))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of shape ``shape``."""
        return cls((0,) * len(shape), shape if type(shape) is tuple else tuple(map(int, shape)))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.offsets)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """The index after the last one, in each dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the part that this box and ``other`` have in common, or None if it has no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(min(a, b) - o for a, b, o in zip(self.stops, other.stops, offsets, strict=True))
        return Box.unchecked(offsets, lengths) if all(n > 0 for n in lengths) else None

    def contains(self, other: Box) -> bool:
        """Return whether ``other``, of the same number of dimensions, lies inside this box."""
        for begin, length, start, size in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            if start < begin or start + size > begin + length:
                return False
        return True

    def without(self, hole: Box) -> Iterator[Box]:
        """Return what lies in this box and not in ``hole``, as disjoint boxes."""
        common = self.intersect(hole)
        if common is None:
            yield self
            return
        rest = self
        for axis in range(self.ndim):
            begin = common.offsets[axis] - rest.offsets[axis]
            end = begin + common.lengths[axis]
            if begin:
                yield rest.narrow(axis, 0, begin)
            if end < rest.lengths[axis]:
                yield rest.narrow(axis, end, rest.lengths[axis])
            rest = rest.narrow(axis, begin, end)

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by ``by``, for example from local coordinates to those of the enclosing tensor."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.lengths)

    def relative_to(self, outer: Box) -> Box:
        """Return the box in coordinates whose origin is the first element of ``outer``."""
        return Box(tuple(o - b for o, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def narrow(self, axis: int, begin: int, end: int) -> Box:
        """Return the part of the box with some of its indices in one dimension.

        Args:
            axis: The dimension.
            begin: The first index, relative to the box's own first index.
            end: The index after the last one, relative in the same way.

        Returns:
            The part.
        """
        offsets, lengths = list(self.offsets), list(self.lengths)
        offsets[axis] += begin
        lengths[axis] = end - begin
        return Box(tuple(offsets), tuple(lengths))

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box from a tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the distance in elements between neighbours along each dimension of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def moved_box(outer: Box, other: Box, part: Box) -> Box:
    """Return where the elements of a part of one box are in another box of the same elements, in the same order.

    Args:
        outer: A box.
        other: A box of equal lengths, except for dimensions of length 1, which either may have more of.
        part: A box inside ``outer``.

    Returns:
        The elements of ``part`` as a box inside ``other``.
    """
    cuts = [
        (begin - first, length)
        for first, size, begin, length in zip(outer.offsets, outer.lengths, part.offsets, part.lengths, strict=True)
        if size != 1
    ]
    offsets: list[int] = []
    lengths: list[int] = []
    for first, size in zip(other.offsets, other.lengths, strict=True):
        begin, length = cuts.pop(0) if size != 1 else (0, 1)
        offsets.append(first + begin)
        lengths.append(length)
    return Box.unchecked(tuple(offsets), tuple(lengths))


def decompose(start: int, length: int, shape: Sequence[int]) -> list[Box]:
    """Split elements ``[start, start + length)`` of the row-major flattened tensor into the fewest contiguous boxes.

    The boxes are disjoint, cover the range exactly, and come in storage order. Each is one run of the flat memory, so
    consecutive parts of it are the boxes' contents. (Boxes with gaps could sometimes be one fewer.) See ByteCheckpoint
    (NSDI'25), section 3.3: irregular tensors are saved without communication.

    Args:
        start: The first element.
        length: The number of elements.
        shape: The shape of the tensor.

    Returns:
        At most ``2 n - 1`` boxes for ``n`` dimensions; none for an empty range.

    Raises:
        PlanError: The range exceeds the tensor.
    """
    total = prod(shape)
    if start < 0 or length < 0 or start + length > total:
        raise PlanError(
            f"flat range [{start}, {start + length}) is outside a tensor of shape {tuple(shape)} ({total} elements)"
        )
    if length == 0:
        return []
    if not shape:
        return [Box((), ())]
    return list(_decompose(start, start + length, tuple(shape), ()))


def _decompose(start: int, stop: int, shape: tuple[int, ...], prefix: tuple[int, ...]) -> Iterator[Box]:
    row = prod(shape[1:])
    if len(shape) == 1 or (start % row == 0 and stop % row == 0):
        yield _box(prefix, start // row, stop // row, shape[1:])
        return
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _decompose(head, tail, shape[1:], (*prefix, first))
        return
    if head:
        yield from _decompose(head, row, shape[1:], (*prefix, first))
        first += 1
    if last > first:
        yield _box(prefix, first, last, shape[1:])
    if tail:
        yield from _decompose(0, tail, shape[1:], (*prefix, last))


def _box(prefix: tuple[int, ...], start: int, stop: int, rest: tuple[int, ...]) -> Box:
    return Box((*prefix, start, *(0 for _ in rest)), (*(1 for _ in prefix), stop - start, *rest))


def decompose_strided(start: int, length: int, lengths: Sequence[int], strides: Sequence[int]) -> list[Box]:
    """Split the elements of a strided box that lie in a range of its memory into few boxes.

    The boxes are disjoint and come in memory order. For a contiguous tensor this is ``decompose``.

    Args:
        start: The first element of the range, counted from the box's first element. It may be negative.
        length: The number of elements of memory, including the gaps of the box.
        lengths: The lengths of the box.
        strides: The distance in memory between neighbours along each dimension, in elements.

    Returns:
        Boxes relative to the given one, at most ``2 n - 1`` for ``n`` dimensions.

    Raises:
        PlanError: Steps along one dimension do not lead past all elements of the faster dimensions, so that elements
            interleave or share memory. No part of a row-major tensor is like this, in any order of its dimensions.
    """
    if 0 in lengths:
        return []
    dims = sorted(range(len(lengths)), key=lambda d: (-strides[d], -lengths[d]))
    span = 1
    for d in reversed(dims):
        if lengths[d] > 1 and strides[d] < span:
            raise PlanError(f"elements of a box of lengths {tuple(lengths)} interleave at strides {tuple(strides)}")
        span += (lengths[d] - 1) * strides[d] if lengths[d] > 1 else 0
    in_memory = [lengths[d] for d in dims]
    steps = [strides[d] for d in dims]
    first, stop = (_elements_before(position, in_memory, steps) for position in (start, start + length))
    boxes = []
    for cut in decompose(first, stop - first, in_memory):
        offsets, sizes = [0] * len(dims), [0] * len(dims)
        for d, offset, size in zip(dims, cut.offsets, cut.lengths, strict=True):
            offsets[d], sizes[d] = offset, size
        boxes.append(Box.unchecked(tuple(offsets), tuple(sizes)))
    return boxes


def _elements_before(position: int, lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements have a lower memory position. The dimensions are sorted from slowest to fastest."""
    inner, before = prod(lengths), 0
    for n, stride in zip(lengths, strides, strict=True):
        if position <= 0:
            return before
        inner //= n
        index = min(position // stride, n) if n > 1 else 0
        before += index * inner
        if index == n:
            return before
        position -= index * stride
    return before + (position > 0)


def find_overlap(offsets: Int64, lengths: Int64) -> tuple[int, int] | None:
    """Return two boxes (rows of the ``[n, d]`` arrays) that share an element, or None if all are disjoint.

    Only boxes that no axis separates are compared pair by pair. The cost is nearly linear for the tilings of meshes and
    flat ranges.

    Args:
        offsets: The offsets of the boxes, ``[n, d]``.
        lengths: The lengths of the boxes, ``[n, d]``.

    Returns:
        The row numbers of two boxes, or None.

    Raises:
        PlanError: More than 4096 boxes form a group that no axis separates, which no sharding produces.
    """
    filled = np.flatnonzero((lengths > 0).all(axis=1))
    for group in inseparable(offsets[filled], lengths[filled], np.zeros(len(filled), np.int64)):
        if len(group) > _MAX_PAIRWISE:
            raise PlanError(
                f"{len(group)} boxes of one tensor interlock so that no axis separates them; refusing to compare all "
                "pairs"
            )
        rows = filled[group]
        starts, stops = offsets[rows], offsets[rows] + lengths[rows]
        for i in range(len(rows) - 1):
            hit = ((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(axis=1)
            if hit.any():
                return int(rows[i]), int(rows[i + 1 + int(np.argmax(hit))])
    return None


def inseparable(offsets: Int64, lengths: Int64, group: Int64) -> list[Int64]:
    """Return groups of boxes (rows of the ``[n, d]`` arrays) that no axis separates; all other boxes are disjoint.

    This is ``find_overlap`` for many tensors at once, without comparing pairs: each axis in turn splits every group
    where no box crosses, until a round over all axes splits nothing.

    Args:
        offsets: The offsets of the boxes, ``[n, d]``.
        lengths: The lengths of the boxes, ``[n, d]``, all at least 1.
        group: The tensor of each box, ascending.

    Returns:
        For each group, its row numbers.
    """
    ndim = offsets.shape[1]
    left = np.arange(len(offsets))
    idle = axis = 0
    while len(left) and idle < ndim:
        start, stop = offsets[left, axis], offsets[left, axis] + lengths[left, axis]
        if ((start[1:] < start[:-1]) & (group[1:] == group[:-1])).any():
            order = np.lexsort((start, group))
            left, group, start, stop = left[order], group[order], start[order], stop[order]
        same = group[1:] == group[:-1]
        first = np.append(True, ~same | (start[1:] >= _running_max(group, stop)[:-1]))
        idle = 0 if int(first.sum()) > 1 + int((~same).sum()) else idle + 1
        group = np.cumsum(first)
        alone = first & np.append(first[1:], True)
        left, group = left[~alone], group[~alone]
        axis = (axis + 1) % ndim
    return [rows for rows in np.split(left, np.flatnonzero(np.diff(group)) + 1) if len(rows) > 1]


def _running_max(group: Int64, values: Int64) -> Int64:
    """Return the largest of ``values`` (all >= 0) so far within each run of equal ``group``."""
    number = np.cumsum(np.append(False, group[1:] != group[:-1]))
    top = int(values.max()) + 1
    # Adding a larger offset for each run lets one running maximum serve all runs.
    if (int(number[-1]) + 1) * top < 1 << 62:
        reach: Int64 = np.maximum.accumulate(number * top + values) - number * top
        return reach
    distinct, ranked = np.unique(values, return_inverse=True)
    lifted = np.maximum.accumulate(number * len(distinct) + ranked) - number * len(distinct)
    return np.asarray(distinct[lifted], np.int64)
