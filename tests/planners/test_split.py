from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners.extents import byte_span, split_box
from bytecheckpoint.tensors.geometry import Box

Boxes = Callable[[tuple[int, ...]], st.SearchStrategy[Box]]

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@given(st.data(), shapes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(0, 60))
@settings(deadline=None, max_examples=examples(200))
def test_slabs_cover_in_order_within_bounds(
    boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...], itemsize: int, max_bytes: int, gap_bytes: int
) -> None:
    outer = Box.whole(shape).shift(data.draw(st.tuples(*(st.integers(0, 5) for _ in shape))))
    inner = data.draw(boxes_within(shape)).shift(outer.offsets)
    pieces = list(split_box(inner, outer, itemsize, max_bytes, gap_bytes))
    memory = np.zeros(shape, np.int64)
    for piece in pieces:
        memory[piece.relative_to(outer).slices()] += 1
    expected = np.zeros(shape, np.int64)
    expected[inner.relative_to(outer).slices()] = 1
    assert (memory == expected).all()
    end = 0
    for piece in pieces:
        start, stop = byte_span(piece, outer, itemsize)
        assert start >= end
        assert stop - start <= max(max_bytes, itemsize)
        end = stop
        numbers = np.arange(outer.numel).reshape(shape)[piece.relative_to(outer).slices()].reshape(-1)
        skipped = (np.diff(numbers) - 1) * itemsize
        assert (skipped <= gap_bytes).all()


@given(st.data(), shapes)
@settings(deadline=None)
def test_span_is_the_first_and_the_last_byte(boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...]) -> None:
    inner = data.draw(boxes_within(shape))
    numbers = np.arange(Box.whole(shape).numel).reshape(shape)[inner.slices()].reshape(-1)
    expected = (int(numbers[0]) * 4, int(numbers[-1] + 1) * 4) if len(numbers) else (0, 0)
    assert byte_span(inner, Box.whole(shape), 4) == expected


def test_a_box_that_fits_is_read_as_one() -> None:
    outer, inner = Box.whole((100, 100)), Box((10, 0), (20, 100))
    assert list(split_box(inner, outer, 4, 1 << 20, 0)) == [inner]
    columns = Box((0, 10), (100, 20))
    assert list(split_box(columns, outer, 4, 1 << 20, 320)) == [columns]
    assert len(list(split_box(columns, outer, 4, 1 << 20, 319))) == 100
    assert [piece.lengths for piece in split_box(inner, outer, 4, 3200, 0)] == [(8, 100), (8, 100), (4, 100)]
    assert [piece.lengths for piece in split_box(Box((0, 0), (1, 100)), outer, 4, 160, 0)] == [
        (1, 40),
        (1, 40),
        (1, 20),
    ]


def test_misuse_is_refused() -> None:
    outer = Box.whole((4, 4))
    for bad in [(0, 16, 0), (4, 0, 0), (4, 16, -1)]:
        with pytest.raises(PlanError, match="cannot split"):
            split_box(outer, outer, *bad)
    with pytest.raises(PlanError, match="not inside"):
        split_box(Box((2, 2), (4, 1)), outer, 4, 16, 0)
    with pytest.raises(PlanError, match="not inside"):
        byte_span(Box((2, 2), (4, 1)), outer, 4)
