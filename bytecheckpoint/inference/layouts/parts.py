"""Parts of stored tensors that one rank of an inference engine requests, and the views by which its loader copies them.

A weight loader slices, transposes and reshapes a stored tensor before it copies a part of it. If the result has exactly
the elements of one box, only that box has to be read, and the whole tensor otherwise. ``box_of`` finds the box and the
order of the view's dimensions in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ...tensors.dtypes import DType
from ...tensors.geometry import Box, row_major_strides
from ...tensors.metadata import BasicMeta
from ...tensors.shards import torch_dtype


@dataclass(frozen=True)
class TensorBox:
    """``box`` of the tensor ``name`` of shape ``shape``, cast to ``dtype``."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@cache
def torch_dtype_of(dtype: DType) -> torch.dtype:
    """Return torch's dtype of this name. Raises ``UnsupportedTensorError`` if this version of torch lacks it."""
    return torch_dtype(BasicMeta(dtype, ()))


def without_duplicates(parts: Iterable[TensorBox]) -> list[TensorBox]:
    """``parts`` in order, without those that another part of the same dtype contains."""
    by_name: dict[tuple[str, DType], list[TensorBox]] = {}
    distinct = list(dict.fromkeys(parts))
    for part in distinct:
        by_name.setdefault((part.name, part.dtype), []).append(part)
    largest = {
        one
        for same in by_name.values()
        for one in same
        if len(same) == 1 or not any(other != one and other.box.contains(one.box) for other in same)
    }
    return [part for part in distinct if part in largest]


@dataclass(frozen=True)
class StridedView:
    """A view of a tensor in row-major order; ``offset`` and ``strides`` count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BoxView:
    """A view of elements of ``box``. It shows exactly the box: permute its dimensions to ``order``, then reshape it to
    the box's lengths. If ``order`` is None, the box is the whole tensor."""

    box: Box
    order: tuple[int, ...] | None

    def undo(self, target: torch.Tensor) -> torch.Tensor | None:
        """Return a view of ``target``, which has the shape of the strided view, in the shape of the box; None if its
        strides do not allow that, or the view does not show exactly the box."""
        if self.order is None:
            return None
        try:
            return target.permute(self.order).view(self.box.lengths)
        except RuntimeError:
            return None

    def apply(self, elements: torch.Tensor, view: StridedView) -> torch.Tensor:
        """Return the strided view of the elements of the box, which are contiguous."""
        if self.order is None:
            return elements.as_strided(view.shape, view.strides, view.offset)
        permuted = elements.reshape([view.shape[d] for d in self.order])
        return permuted.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def box_to_read(shape: Sequence[int], view: StridedView) -> BoxView:
    """Return the box that must be read for ``view``: the one that it shows, or the whole tensor."""
    return box_of(shape, view) or BoxView(Box.whole(shape), None)


def box_of(shape: Sequence[int], view: StridedView) -> BoxView | None:
    """The box that ``view`` of a tensor of ``shape`` shows, each element once; None if there is no such box."""
    order = tuple(sorted(range(len(view.shape)), key=lambda d: (-view.strides[d], d)))
    if view.numel == 0:
        return BoxView(Box((0,) * len(shape), (0, *shape[1:])), order)
    strides = row_major_strides(shape)
    offsets = [view.offset // stride % size if size else 0 for stride, size in zip(strides, shape, strict=True)]
    lengths = [1] * len(shape)
    innermost = len(shape)  # dimensions from here on have their final length
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
    """``(size, stride)`` of the view's dimensions in ``order``, widest stride first.

    Dimensions of one element are left out, and contiguous neighbours are merged.
    """
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
