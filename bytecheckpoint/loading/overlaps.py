"""Find memory that a load would write twice: elements of one tensor, or of two, at the same address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..tensors.derived import is_derived
from ..tensors.shards import Shard


class _Extent(NamedTuple):
    """The bytes from the first to the last element of a shard, by address. ``steps`` are (stride, size) in elements.

    Expanded dimensions count once: their elements share memory as a whole, which the load checks separately.
    """

    start: int
    end: int
    itemsize: int
    steps: tuple[tuple[int, int], ...]
    fqn: str


def overlapping_shards(shards: Iterable[Shard]) -> Iterator[tuple[str, str]]:
    """The names of shards that share a part of their memory; twice one name if a shard's own elements share memory.

    Two shards that cover the same contiguous bytes do not count: they are one tensor in two shapes or sections.
    """
    by_device: dict[torch.device, list[tuple[int, int, Shard]]] = {}
    for shard in shards:
        tensor = shard.tensor
        if is_derived(tensor) or tensor.is_meta or not (nbytes := tensor.nbytes):
            continue
        start = tensor.data_ptr()
        end = start + nbytes
        if not tensor.is_contiguous():
            extent = _extent(shard)
            if _overlaps_itself(extent):
                yield shard.fqn, shard.fqn
                continue
            end = extent.end
        by_device.setdefault(tensor.device, []).append((start, end, shard))
    for placed in by_device.values():
        yield from _overlapping_pairs(sorted(_extent(placed[row][2]) for row in _touching(placed)))


def _touching(placed: Sequence[tuple[int, int, Shard]]) -> list[int]:
    """The rows whose bytes, from the first to the last, overlap those of another row; usually none."""
    start = np.array([row[0] for row in placed], np.uint64)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.array([row[1] for row in placed], np.uint64)[order]
    overlaps_earlier = start[1:] < np.maximum.accumulate(end)[:-1]
    if not overlaps_earlier.any():
        return []
    # A row overlaps a later one if that one begins before it ends.
    overlaps_later = np.searchsorted(start, end, side="left") > np.arange(len(start)) + 1
    rows: list[int] = order[np.append(False, overlaps_earlier) | overlaps_later].tolist()
    return rows


def _extent(shard: Shard) -> _Extent:
    tensor, itemsize = shard.tensor, shard.tensor.element_size()
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return _Extent(start, start + tensor.numel() * itemsize, itemsize, ((1, tensor.numel()),), shard.fqn)
    steps = tuple(sorted((t, n) for t, n in zip(tensor.stride(), tensor.shape, strict=True) if t != 0 and n > 1))
    last = sum(stride * (size - 1) for stride, size in steps)
    return _Extent(start, start + (last + 1) * itemsize, itemsize, steps, shard.fqn)


def _overlaps_itself(extent: _Extent) -> bool:
    reach = 0  # offset of the last element in the dimensions so far
    for stride, size in extent.steps:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in extent.steps:
        offsets = (offsets[:, None] + torch.arange(size) * stride).view(-1)
    return len(torch.unique(offsets)) != len(offsets)


def _overlapping_pairs(extents: Sequence[_Extent]) -> Iterator[tuple[str, str]]:
    active: list[_Extent] = []
    for extent in extents:
        if active:
            active = [other for other in active if other.end > extent.start]
            yield from ((extent.fqn, other.fqn) for other in active if _share_elements(other, extent))
        active.append(extent)


def _share_elements(one: _Extent, other: _Extent) -> bool:
    """Whether two shards whose extents overlap have an element in common, unless they cover the same bytes."""
    if _is_dense(one) and _is_dense(other):
        return one[:2] != other[:2]
    # Columns of one matrix, for example. Mark the bytes of one of them.
    start, end = min(one.start, other.start), max(one.end, other.end)
    marks = torch.zeros(end - start, dtype=torch.bool)
    _bytes(marks, one, start).fill_(True)
    return bool(_bytes(marks, other, start).any())


def _is_dense(extent: _Extent) -> bool:
    elements = 1
    for _, size in extent.steps:
        elements *= size
    return extent.end - extent.start == elements * extent.itemsize


def _bytes(marks: torch.Tensor, extent: _Extent, start: int) -> torch.Tensor:
    sizes = [*(size for _, size in extent.steps), extent.itemsize]
    strides = [*(stride * extent.itemsize for stride, _ in extent.steps), 1]
    return marks.as_strided(sizes, strides, extent.start - start)
