from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners import load_plan
from bytecheckpoint.planners.coverage import first_uncovered
from bytecheckpoint.planners.load_plan import plan_load
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

Tilings = Callable[[tuple[int, ...]], st.SearchStrategy[list[Box]]]
Boxes = Callable[[tuple[int, ...]], st.SearchStrategy[Box]]

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def table(*shapes: tuple[int, ...]) -> TensorTable:
    return TensorTable.build(
        ("model", f"t{index}", BasicMeta(DTYPES["int64"], shape)) for index, shape in enumerate(shapes)
    )


@contextmanager
def pruned() -> Iterator[None]:
    """Small tensors take the path of large ones, some pairs at a time."""
    with mock.patch.object(load_plan, "_FEW_PAIRS", 0), mock.patch.object(load_plan, "_MAX_PAIRS", 3):
        yield


@given(st.data(), st.lists(shapes, max_size=3))
@settings(deadline=None)
def test_any_box_from_any_tiling_equals_slicing(
    tilings: Tilings, boxes_within: Boxes, data: st.DataObject, shapes: list[tuple[int, ...]]
) -> None:
    tensors = table(*shapes)
    stored_rows = [(row, box) for row, shape in enumerate(shapes) for box in data.draw(tilings(shape))]
    drawn = [(row, data.draw(boxes_within(shape))) for row, shape in enumerate(shapes) for _ in range(3)]
    requested_rows = data.draw(st.permutations(drawn))
    stored, requested = BoxTable.build(stored_rows), BoxTable.build(requested_rows)
    plan = plan_load(tensors, stored, requested)
    with pruned():
        tensor_by_tensor = plan_load(tensors, stored, requested)
    with mock.patch.object(load_plan, "_MAX_PAIRS", 3):
        some_pairs_at_a_time = plan_load(tensors, stored, requested)
    for other in (tensor_by_tensor, some_pairs_at_a_time):
        for column in ("requested", "stored"):
            assert getattr(plan, column).tolist() == getattr(other, column).tolist()
        assert plan.boxes.offsets.tolist() == other.boxes.offsets.tolist()
        assert plan.boxes.lengths.tolist() == other.boxes.lengths.tolist()
    assert [box for *_, box in plan.rows()] == [plan.boxes.box_of(row) for row in range(len(plan))]

    full = [np.arange(prod(shape)).reshape(shape) for shape in shapes]
    local = [full[row][box.slices()].copy() for row, box in stored_rows]
    filled = [np.full(box.lengths, -1) for _, box in requested_rows]
    pairs = list(zip(plan.requested.tolist(), plan.stored.tolist()))
    assert pairs == sorted(pairs)
    for row, (to, source) in enumerate(pairs):
        box = plan.boxes.box_of(row)
        assert box.numel > 0
        assert int(plan.boxes.tensor[row]) == requested_rows[to][0] == stored_rows[source][0]
        target = filled[to][box.relative_to(requested_rows[to][1]).slices()]
        assert (target == -1).all()
        filled[to][box.relative_to(requested_rows[to][1]).slices()] = local[source][
            box.relative_to(stored_rows[source][1]).slices()
        ]
    for (row, box), found in zip(requested_rows, filled):
        assert (found == full[row][box.slices()]).all()


@given(st.data(), st.lists(st.integers(1, 6), max_size=3).map(tuple))
@settings(deadline=None)
def test_a_missing_stored_box_is_found(
    tilings: Tilings, boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(tilings(shape))
    lost = data.draw(st.sampled_from([box for box in boxes if box.numel]))
    box = data.draw(boxes_within(shape))
    stored = BoxTable.build([(0, other) for other in boxes if other != lost])
    requested = BoxTable.build([(0, box)])
    if box.numel == 0 or lost.intersect(box) is None:
        plan_load(table(shape), stored, requested)
        return
    for path in (nullcontext, pruned):
        with path(), pytest.raises(PlanError, match=r"model\.t0: requested"):
            plan_load(table(shape), stored, requested)


def test_the_fault_names_every_tensor_and_the_first_missing_region() -> None:
    tensors = table((8, 4), (6,), (2,))
    stored = BoxTable.build([(0, Box((0, 0), (4, 4))), (0, Box((6, 0), (2, 4))), (2, Box((0,), (2,)))])
    whole = [(row, Box.whole(tensors.shape_of(row))) for row in range(3)]
    with pytest.raises(PlanError) as caught:
        plan_load(tensors, stored, BoxTable.build([*whole, (0, Box((5, 1), (1, 1)))]))
    text = str(caught.value)
    assert "model.t0: requested [0:8,0:4], of which [4:6,0:4] is not stored (and 1 more requested boxes)" in text
    assert "model.t1: requested [0:6], of which nothing is stored" in text
    assert "model.t2" not in text


def test_a_requested_box_outside_the_tensor_is_not_stored() -> None:
    stored = BoxTable.build([(0, Box((0,), (6,)))])
    with pytest.raises(PlanError, match=r"\[6:8\] is not stored"):
        plan_load(table((6,)), stored, BoxTable.build([(0, Box((4,), (4,)))]))


def test_misuse_is_refused() -> None:
    tensors = table((6,), (6,))
    with pytest.raises(PlanError, match="not sorted"):
        plan_load(tensors, BoxTable.build([(1, Box((0,), (6,))), (0, Box((0,), (6,)))]), BoxTable.build([]))
    with pytest.raises(PlanError, match="dimensions"):
        plan_load(tensors, BoxTable.build([(0, Box((0,), (6,)))]), BoxTable.build([(0, Box((0, 0), (2, 1)))]))


def test_nothing_is_requested() -> None:
    stored = BoxTable.build([(0, Box((0,), (6,)))])
    assert len(plan_load(table((6,)), stored, BoxTable.build([]))) == 0
    assert len(plan_load(table((6,)), stored, BoxTable.build([(0, Box((3,), (0,)))]))) == 0


@given(st.data(), st.lists(st.integers(1, 4), max_size=3).map(tuple))
@settings(deadline=None)
def test_first_uncovered_agrees_with_marking_cells(
    boxes_within: Boxes, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(st.lists(boxes_within(shape), max_size=5))
    region = data.draw(boxes_within(shape))
    marked = np.zeros(shape, bool)
    for box in boxes:
        marked[box.slices()] = True
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), len(shape))
    lengths = np.array([box.lengths for box in boxes], np.int64).reshape(len(boxes), len(shape))
    hole = first_uncovered(region, offsets, lengths)
    assert (hole is None) == bool(marked[region.slices()].all())
    if hole is not None:
        assert hole.numel > 0
        assert region.contains(hole)
        assert not marked[hole.slices()].any()
