from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_plans import rank_plan

from bytecheckpoint.planners import wire
from bytecheckpoint.planners.local_plan import (
    OWN_BOXES,
    WHOLE,
    LocalPlan,
    PlanTable,
    ValueNames,
    pack_boxes,
    unpack_boxes,
)
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable


def sample() -> PlanTable:
    tensors = TensorTable.build(
        [
            ("model", "w", BasicMeta(DTYPES["bfloat16"], (4, 3))),
            ("model", "scale", BasicMeta(DTYPES["float32"], ())),
            ("rng", "state", BasicMeta(DTYPES["uint8"], (16,))),
        ]
    )
    marks = np.array([[False, False, True], [False, True, False], [True, False, False], [True, False, True]])
    values = ValueNames(["extra", "extra"], [b"\x00step", b""], np.array([False, True]))
    layouts = [MeshLayout((2, 3), ((1, 0), ()))]
    sections = [("model", "ddp"), ("rng", "tree")]
    held = np.array([1, WHOLE, OWN_BOXES])
    return PlanTable(tensors, *marks, held, layouts, values, [("model.tied", "model.w")], sections)


def boxes() -> BoxTable:
    return BoxTable.build([(2, Box((0,), (7,))), (0, Box((1, 0), (2, 3))), (1, Box((), ()))])


def assert_same(a: PlanTable, b: PlanTable) -> None:
    assert (a.tensors.names, a.tensors.sections) == (b.tensors.names, b.tensors.sections)
    for column in ("section", "dtype", "ndim", "shape"):
        assert getattr(a.tensors, column).tolist() == getattr(b.tensors, column).tolist()
    for column in ("own", "pinned", "compared", "held"):
        assert getattr(a, column).tolist() == getattr(b, column).tolist()
    assert (a.values.keys(), a.values.per_rank.tolist()) == (b.values.keys(), b.values.per_rank.tolist())
    assert (a.aliases, a.sections, a.layouts) == (b.aliases, b.sections, b.layouts)


def test_a_table_survives_the_wire() -> None:
    assert_same(PlanTable.from_bytes(sample().to_bytes()), sample())
    nothing = rank_plan(TensorTable.build([]), BoxTable.build([])).table
    assert_same(PlanTable.from_bytes(nothing.to_bytes()), nothing)


def test_boxes_survive_the_wire() -> None:
    tensors = sample().tensors
    none, some = pack_boxes(BoxTable.build([]), tensors), pack_boxes(boxes(), tensors)
    both, counts = unpack_boxes([none, some, none, some], tensors)
    assert list(both) == [*boxes(), *boxes()]
    assert counts.tolist() == [0, 3, 0, 3]
    assert len(unpack_boxes([none], tensors)[0]) == 0


def test_boxes_of_huge_tensors_survive_the_wire() -> None:
    tensors = TensorTable.build([("model", "w", BasicMeta(DTYPES["uint8"], (2**40,)))])
    held = BoxTable.build([(0, Box((2**39,), (2**39,)))])
    assert list(unpack_boxes([pack_boxes(held, tensors)], tensors)[0]) == list(held)


def test_ranks_with_the_same_structure_have_the_same_table() -> None:
    """Only coordinates in a mesh and own boxes differ."""

    def plan(rank: int) -> LocalPlan:
        metas = [("model", "w", (8,)), ("model", "b", (2,)), ("model", "flat", (9,)), ("rng", "s", (4,))]
        held = [Box((4 * rank,), (4,)), Box((0,), (2,)), Box((0,), (4,)), Box((rank,), (3,))]
        return rank_plan(
            TensorTable.build((section, name, BasicMeta(DTYPES["uint8"], shape)) for section, name, shape in metas),
            BoxTable.build([(0, held[0]), (1, held[1]), (3, held[2]), (2, held[3])]),
            [(rank,)],
            own=[False, False, False, True],
            held=[1, WHOLE, OWN_BOXES, WHOLE],
            layouts=[MeshLayout((2,), ((0,),))],
            values=[("extra", b"x", True)],
        )

    assert plan(0).packed_table == plan(1).packed_table
    assert plan(1).flat_coordinates().tolist() == [1]
    assert list(plan(1).own_boxes()) == [Box((1,), (3,))]
    assert plan(0).own_boxes().tensor.tolist() == [2]


def test_what_came_over_the_wire_may_be_changed() -> None:
    table, tensors = PlanTable.from_bytes(sample().to_bytes()), sample().tensors
    held, _ = unpack_boxes([pack_boxes(boxes(), tensors)], tensors)
    table.tensors.shape[0] = 9
    held.offsets[0] = 9


numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4) | st.lists(st.integers(0, 2**33), max_size=4)


@given(numbers)
@example([255])
@example([256])
@example([2**32 - 1])
@example([2**32])
@settings(deadline=None)
def test_a_column_survives_in_the_narrowest_words(values: list[int]) -> None:
    packed = wire.pack(["", np.array(values, np.int64)])
    assert wire.unpack(packed)[1].tolist() == values
    width = next((width for width in (1, 2, 4) if all(0 <= value < 1 << 8 * width for value in values)), 8)
    assert len(packed) <= 5 + width * len(values)


@given(st.lists(numbers, max_size=5))
@settings(deadline=None)
def test_many_columns_are_packed_as_one(parts: list[list[int]]) -> None:
    starts = np.cumsum([0, *map(len, parts)])
    joined = np.array([number for part in parts for number in part], np.int64)
    found = wire.unpack(wire.pack(wire.pack_slices(joined, starts)))
    assert [column.tolist() for column in found] == parts


def test_flags_survive_the_wire() -> None:
    flags = np.array([True, False])
    assert wire.unpack(wire.pack(flags)).tolist() == [True, False]
    found = wire.unpack(wire.pack(wire.pack_slices(flags, np.array([0, 1, 2]))))
    assert [one.tolist() for one in found] == [[True], [False]]
