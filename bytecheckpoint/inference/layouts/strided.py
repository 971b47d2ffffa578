"""Strided views of a tensor as boxes of it. Pure numbers.

A weight loader cuts, transposes and reshapes a stored tensor before it copies a part of it. Where the elements of the
result are those of one box, that box is all that has to be read; ``box_of`` finds it, and how the view's dimensions are
those of the box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..geometry import Box, row_major_strides

__all__ = ["BoxView", "StridedView", "box_of"]


@dataclass(frozen=True)
class StridedView:
    """Of a tensor whose elements lie in row-major order; ``offset`` and ``strides`` count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BoxView:
    """A view is ``box`` if its dimensions are taken in this ``order`` and the result is given the box's lengths."""

    box: Box
    order: tuple[int, ...]


def box_of(shape: Sequence[int], view: StridedView) -> BoxView | None:
    """The box of a tensor of ``shape`` that ``view`` shows, each element once; None where that is no box."""
    order = tuple(sorted(range(len(view.shape)), key=lambda d: (-view.strides[d], d)))
    if view.numel == 0:
        return BoxView(Box((0,) * len(shape), _empty(shape)), order)
    offsets = _index_of(view.offset, shape)
    lengths = [1] * len(shape)
    strides = row_major_strides(shape)
    innermost = len(shape)  # dimensions from here on have their length
    for size, stride in reversed(_runs(view, order)):
        at = _dimension(stride, strides, shape, innermost)
        if at is None:
            return None
        while size > 1:
            if at < 0:
                return None
            if size <= shape[at]:
                lengths[at], size = size, 1
            elif size % shape[at] == 0:
                lengths[at], size = shape[at], size // shape[at]
            else:
                return None
            innermost, at = at, at - 1
    if any(offset + length > size for offset, length, size in zip(offsets, lengths, shape, strict=True)):
        return None
    return BoxView(Box(tuple(offsets), tuple(lengths)), order)


def _runs(view: StridedView, order: Sequence[int]) -> list[tuple[int, int]]:
    """``(size, stride)`` of the view's dimensions from the widest stride to the narrowest, without those of one
    element, and with dimensions joined that lie one behind the other."""
    runs: list[tuple[int, int]] = []
    for d in order:
        size, stride = view.shape[d], view.strides[d]
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def _dimension(stride: int, strides: Sequence[int], shape: Sequence[int], below: int) -> int | None:
    """The last dimension before ``below`` that has this stride and more than one element."""
    return next((d for d in reversed(range(below)) if strides[d] == stride and shape[d] > 1), None)


def _index_of(offset: int, shape: Sequence[int]) -> list[int]:
    index = []
    for stride, size in zip(row_major_strides(shape), shape, strict=True):
        index.append(offset // stride % size if size else 0)
    return index


def _empty(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if d == 0 else size for d, size in enumerate(shape))
