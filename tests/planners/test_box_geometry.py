from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import PlanError
from bytecheckpoint.tensors.geometry import Box, decompose, find_overlap

Boxes = Callable[[tuple[int, ...]], st.SearchStrategy[Box]]

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths))))


@given(st.data(), shapes)
@settings(deadline=None)
def test_decompose_covers_the_range_in_storage_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    boxes = decompose(start, length, shape)
    numbers = np.arange(total).reshape(shape)
    found = [int(n) for box in boxes for n in numbers[box.slices()].reshape(-1)]
    assert found == list(range(start, start + length))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _contiguous_masks(shape: tuple[int, ...]) -> Iterator[int]:
    """Every box that is one piece of the flat memory, as a set of bits."""
    axes = [[(low, high) for low in range(size) for high in range(low + 1, size + 1)] for size in shape]
    numbers = np.arange(prod(shape)).reshape(shape)
    for ranges in product(*axes):
        inside = numbers[tuple(slice(a, b) for a, b in ranges)].reshape(-1).tolist()
        if inside[-1] - inside[0] + 1 == len(inside):
            yield sum(1 << n for n in inside)


@pytest.mark.parametrize(
    "shape", [(5,), (3, 3), (4, 1), (1, 4), (4, 5), (2, 2, 2), (2, 1, 3), (4, 3, 2), (2, 2, 1, 2), (1, 3, 1, 2, 3)]
)
def test_decompose_is_minimal(shape: tuple[int, ...]) -> None:
    by_first: dict[int, list[int]] = {}
    for mask in _contiguous_masks(shape):
        by_first.setdefault(mask & -mask, []).append(mask)

    @cache
    def fewest(left: int) -> int:
        if left == 0:
            return 0
        return 1 + min(fewest(left & ~mask) for mask in by_first[left & -left] if mask & ~left == 0)

    total = prod(shape)
    for start in range(total):
        for stop in range(start + 1, total + 1):
            assert len(decompose(start, stop - start, shape)) == fewest((1 << stop) - (1 << start)), (start, stop)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1), (5, 2), (7, 0)])
def test_decompose_refuses_a_range_outside_the_tensor(start: int, length: int) -> None:
    with pytest.raises(PlanError, match="outside a tensor"):
        decompose(start, length, (2, 3))


@given(st.data(), shapes)
@settings(deadline=None)
def test_boxes_are_sets_of_cells(boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    common = a.intersect(b)
    assert (set() if common is None else cells(common)) == cells(a) & cells(b)
    assert common is None or common.numel > 0
    assert a.numel == len(cells(a))
    if cells(a) and cells(b):
        assert a.contains(b) == (cells(b) <= cells(a))
    assert a.shift(b.offsets).relative_to(Box(b.offsets, a.lengths)) == a


@given(st.data(), shapes, st.integers(0, 6))
@settings(deadline=None)
def test_find_overlap_agrees_with_all_pairs(
    boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...], count: int
) -> None:
    boxes = [data.draw(boxes_within(shape)) for _ in range(count)]
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(count, len(shape))
    lengths = np.array([box.lengths for box in boxes], np.int64).reshape(count, len(shape))
    pair = find_overlap(offsets, lengths)
    overlaps = any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert (pair is not None) == overlaps
    if pair is not None:
        assert pair[0] != pair[1]
        assert boxes[pair[0]].intersect(boxes[pair[1]])


@given(st.data(), shapes)
@settings(deadline=None)
def test_a_tiling_has_no_overlap(
    tilings: Callable[[tuple[int, ...]], st.SearchStrategy[list[Box]]], data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(tilings(shape))
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), len(shape))
    lengths = np.array([box.lengths for box in boxes], np.int64).reshape(len(boxes), len(shape))
    assert find_overlap(offsets, lengths) is None
    assert sum(box.numel for box in boxes) == prod(shape)


def test_boxes_refuse_negative_and_ragged_numbers() -> None:
    for offsets, lengths in [((-1,), (2,)), ((0,), (-2,)), ((0, 0), (1,))]:
        with pytest.raises(PlanError, match="not a box"):
            Box(offsets, lengths)
