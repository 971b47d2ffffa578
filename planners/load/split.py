"""Split a part of a stored box into sub-boxes that are read one by one, with little waste and bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError
from ...tensors.geometry import Box, row_major_strides

__all__ = ["byte_span", "split_box"]


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
    first = sum(o * s for o, s in zip(local.offsets, strides))
    last = sum((o + n - 1) * s for o, n, s in zip(local.offsets, local.lengths, strides))
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
