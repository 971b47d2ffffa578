"""Find memory that a load would write twice: elements of one tensor, or of two, at the same address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch

from ..tensors.derived import is_derived
from ..tensors.shards import Shard

_Placed: TypeAlias = tuple[int, int, Shard]
"""A shard, after where its bytes begin and end."""


class _Extent(NamedTuple):
    """The bytes from the first to the last element of a tensor, by address. ``steps`` are (stride, size) in elements.

    Expanded dimensions count once: their elements share memory as a whole, which the load checks separately.
    """

    start: int
    end: int
    itemsize: int
    steps: tuple[tuple[int, int], ...]


def overlapping_shards(shards: Iterable[Shard]) -> Iterator[tuple[str, str]]:
    """The names of shards that share a part of their memory; twice one name if a shard's own elements share memory.

    Two shards that cover the same contiguous bytes do not count: they are one tensor in two shapes or sections.
    """
    by_device: dict[torch.device, list[_Placed]] = {}
    for shard in shards:
        tensor = shard.tensor
        if is_derived(tensor) or tensor.is_meta or not (nbytes := tensor.nbytes):
            continue
        start = tensor.data_ptr()
        end = start + nbytes
        if not tensor.is_contiguous():
            extent = _extent(tensor)
            if _overlaps_itself(extent):
                yield shard.fqn, shard.fqn
                continue
            end = extent.end
        by_device.setdefault(tensor.device, []).append((start, end, shard))
    for placed in by_device.values():
        yield from _overlapping_pairs(sorted(placed, key=itemgetter(0, 1)))


def _extent(tensor: torch.Tensor) -> _Extent:
    start, itemsize = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return _Extent(start, start + tensor.numel() * itemsize, itemsize, ((1, tensor.numel()),))
    steps = tuple(sorted((t, n) for t, n in zip(tensor.stride(), tensor.shape, strict=True) if t != 0 and n > 1))
    last = sum(stride * (size - 1) for stride, size in steps)
    return _Extent(start, start + (last + 1) * itemsize, itemsize, steps)


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


def _overlapping_pairs(placed: Sequence[_Placed]) -> Iterator[tuple[str, str]]:
    """The names of the shards that overlap; ``placed`` are in the order of their first bytes."""
    earlier: list[_Placed] = []  # since all others have ended; usually one
    reach = 0  # where the last of them ends
    # This loop runs once for each of many thousand small tensors.
    for one in placed:
        start, end, shard = one
        if start >= reach:
            earlier, reach = [one], end
            continue
        earlier = [other for other in earlier if other[1] > start]
        for _, _, other in earlier:
            if _share_elements(_extent(other.tensor), _extent(shard.tensor)):
                yield shard.fqn, other.fqn
        earlier.append(one)
        reach = max(reach, end)


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
