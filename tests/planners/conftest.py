from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from bytecheckpoint.tensors.geometry import Box, decompose

Shape = tuple[int, ...]


def _split(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Random recursive cuts, straight through one axis each time."""
    axes = [axis for axis in range(box.ndim) if box.lengths[axis] > 1]
    if not axes or depth == 0 or draw(st.integers(0, 3)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.lengths[axis] - 1))
    lower = Box(box.offsets, (*box.lengths[:axis], at, *box.lengths[axis + 1 :]))
    upper = Box(
        (*box.offsets[:axis], box.offsets[axis] + at, *box.offsets[axis + 1 :]),
        (*box.lengths[:axis], box.lengths[axis] - at, *box.lengths[axis + 1 :]),
    )
    return _split(draw, lower, depth - 1) + _split(draw, upper, depth - 1)


def _grid(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """A mesh: every axis cut as torch chunks it, with empty boxes where there are more parts than indices."""
    boxes = [Box((), ())]
    for size in shape:
        parts = draw(st.integers(1, 4))
        chunk = -(-size // parts)
        cuts = [min(size, index * chunk) for index in range(parts + 1)]
        boxes = [Box((*box.offsets, low), (*box.lengths, high - low)) for box in boxes for low, high in pairwise(cuts)]
    return boxes


def _ranges(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Flat ranges, decomposed."""
    total = Box.whole(shape).numel
    inner = draw(st.lists(st.integers(0, total), max_size=5))
    cuts = [0, *sorted(inner), total]
    return [box for low, high in pairwise(cuts) for box in decompose(low, high - low, shape)]


@st.composite
def tiling(draw: st.DrawFn, shape: Shape) -> list[Box]:
    kind = draw(st.sampled_from(["split", "grid", "ranges"]))
    if kind == "split":
        return _split(draw, Box.whole(shape), 5)
    return _grid(draw, shape) if kind == "grid" else _ranges(draw, shape)


@pytest.fixture(scope="session")
def tilings() -> Callable[[Shape], st.SearchStrategy[list[Box]]]:
    """Strategy of lists of disjoint boxes (some empty) that cover a tensor of this shape."""
    return tiling


@st.composite
def box_within(draw: st.DrawFn, shape: Shape) -> Box:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@pytest.fixture(scope="session")
def boxes_within() -> Callable[[Shape], st.SearchStrategy[Box]]:
    """Strategy of boxes inside a tensor of this shape, empty ones among them."""
    return box_within
