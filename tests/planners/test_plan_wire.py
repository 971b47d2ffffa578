from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners import (
    OWN_BOXES,
    WHOLE,
    Assignment,
    LocalPlan,
    PlanGroup,
    PlanTable,
    ValueEntry,
    pack_boxes,
    plan_groups,
    plan_save,
    unpack_boxes,
    wire,
)
from bytecheckpoint.planners.local_plan import ValueNames
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


def own_plan() -> LocalPlan:
    """A rank that holds just what ``sample`` says, and all of it."""
    table = sample()
    names = [*table.tensors.names[:2], "rng.state@0"]
    tensors = TensorTable(
        names,
        table.tensors.sections,
        table.tensors.section,
        table.tensors.dtype,
        table.tensors.ndim,
        table.tensors.shape,
    )
    shards = BoxTable.build([(0, Box((0, 0), (4, 3))), (1, Box((), ())), (2, Box((0,), (16,)))])
    return LocalPlan(tensors, shards, [], np.array([-1, -1, 0]))


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
    nothing = LocalPlan(TensorTable.build([]), BoxTable.build([])).table()
    assert_same(PlanTable.from_bytes(nothing.to_bytes()), nothing)


def test_boxes_survive_the_wire() -> None:
    tensors = sample().tensors
    assert pack_boxes(BoxTable.build([])) == b""
    both, counts = unpack_boxes([b"", pack_boxes(boxes()), b"", pack_boxes(boxes())], tensors)
    assert list(both) == [*boxes(), *boxes()]
    assert counts.tolist() == [0, 3, 0, 3]
    assert len(unpack_boxes([b""], tensors)[0]) == 0


def test_ranks_with_the_same_structure_have_the_same_table() -> None:
    """Only names of own tensors, coordinates in a mesh, and own boxes differ."""

    def plan(rank: int) -> LocalPlan:
        metas = [("model", "w", (8,)), ("model", "b", (2,)), ("model", "flat", (9,)), ("rng", f"s@{rank}", (4,))]
        held = [Box((4 * rank,), (4,)), Box((0,), (2,)), Box((0,), (4,)), Box((rank,), (3,))]
        return LocalPlan(
            TensorTable.build((section, name, BasicMeta(DTYPES["uint8"], shape)) for section, name, shape in metas),
            BoxTable.build([(0, held[0]), (1, held[1]), (3, held[2]), (2, held[3])]),
            [ValueEntry("extra", b"x", bytes([rank]), rank)],
            np.array([-1, -1, -1, rank]),
            held=np.array([1, WHOLE, OWN_BOXES, WHOLE]),
            layouts=[MeshLayout((2,), ((0,),))],
            coordinates=[(rank,)],
        )

    assert plan(0).table().to_bytes() == plan(1).table().to_bytes()
    assert plan(0).table().tensors.names[3] == "rng.s"
    assert plan(1).flat_coordinates().tolist() == [1]
    assert list(plan(1).own_boxes()) == [Box((1,), (3,))]
    assert plan(0).own_boxes().tensor.tolist() == [2]


def test_what_came_over_the_wire_may_be_changed() -> None:
    table, held = PlanTable.from_bytes(sample().to_bytes()), unpack_boxes([pack_boxes(boxes())], sample().tensors)[0]
    table.tensors.shape[0] = 9
    held.offsets[0] = 9


rows = st.lists(st.integers(0, 2**40), max_size=5).map(lambda values: np.array(values, np.int64))


@given(st.lists(st.tuples(st.text(max_size=5), rows), max_size=3), st.lists(st.booleans(), max_size=5))
@settings(deadline=None)
def test_an_assignment_survives_the_wire(files: list[tuple[str, Any]], shared: list[bool]) -> None:
    sent = Assignment(files, np.arange(len(shared)), np.array(shared, np.bool_))
    found = Assignment.from_bytes(sent.to_bytes())
    assert [(section, part.tolist()) for section, part in found.files] == [(s, part.tolist()) for s, part in files]
    assert found.values.tolist() == list(range(len(shared)))
    assert found.shared.tolist() == shared


def test_an_assignment_must_speak_of_what_the_rank_holds() -> None:
    plan = own_plan()
    plan.values.append(ValueEntry("extra", b"", b"", 0))
    plan.values.append(ValueEntry("extra", b"x", b"", 0))
    for sent in (
        Assignment([("model", np.array([0, 3]))], np.array([0]), np.array([True])),
        Assignment([("model", np.array([0, 1]))], np.array([2]), np.array([True])),
        Assignment([("model", np.array([-1]))], np.array([0]), np.array([True])),
    ):
        with pytest.raises(PlanError, match="malformed save assignment"):
            Assignment.from_bytes(sent.to_bytes(), plan)


def test_every_cut_is_refused() -> None:
    for good, read in (
        (sample().to_bytes(), PlanTable.from_bytes),
        (_assignment().to_bytes(), Assignment.from_bytes),
        (pack_boxes(boxes()), lambda data: unpack_boxes([data or b"?"], sample().tensors)),
    ):
        for end in range(len(good)):
            with pytest.raises(PlanError, match="malformed"):
                read(good[:end])
        with pytest.raises(PlanError, match="malformed"):
            read(good + b"\0")


def _assignment() -> Assignment:
    return Assignment([("model", np.array([0, 1]))], np.array([0]), np.array([True]))


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(PlanError, match="malformed plan table"):
        PlanTable.from_bytes(_assignment().to_bytes())
    with pytest.raises(PlanError, match="malformed boxes"):
        unpack_boxes([_assignment().to_bytes()], sample().tensors)
    with pytest.raises(PlanError, match="malformed save assignment"):
        Assignment.from_bytes(sample().to_bytes())


def _harmless(data: bytes) -> None:
    """The message is rejected with ``PlanError``, or decodes to a valid plan."""
    with suppress(PlanError):
        table = PlanTable.from_bytes(data)
        own = own_plan()
        groups = [PlanGroup.of(table, [1], [np.array([1, 2])], boxes(), np.array([3]))]
        groups += [PlanGroup.of(own.table(), [0], [own.flat_coordinates()], own.own_boxes(), np.array([3]))]
        plan_groups(groups, set(), world_size=2)
    with suppress(PlanError):
        held, _ = unpack_boxes([data], own_plan().tensors)
        plan_save([own_plan(), LocalPlan(own_plan().tensors, held, scope=np.array([-1, -1, 0]))])
    with suppress(PlanError):
        Assignment.from_bytes(data)


@given(st.binary(max_size=64))
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x81" * 2000)
@example(b"\x91" * 2000)
@example(b"\xd6\xff\xff\xff\xff\xff")
@settings(deadline=None)
def test_noise_is_harmless(data: bytes) -> None:
    _harmless(data)


@given(st.data())
@settings(deadline=None, max_examples=examples(300))
def test_changed_bytes_are_harmless(data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from([sample().to_bytes(), pack_boxes(boxes())])))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    _harmless(bytes(changed))


def words(*values: int) -> bytes:
    return b"\x08" + np.array(values, "<i8").tobytes()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4) | st.lists(st.integers(0, 2**33), max_size=4))
@example([255])
@example([256])
@example([2**32 - 1])
@example([2**32])
@settings(deadline=None)
def test_a_column_survives_in_the_narrowest_words(values: list[int]) -> None:
    column = wire.pack_column(np.array(values, np.int64))
    fields = wire.Fields("test", wire.pack_message("test", {"column": column}))
    assert fields.integers("column", len(values)).tolist() == values
    long = wire.pack_column(np.array(values * 100, np.int64))
    fields = wire.Fields("test", wire.pack_message("test", {"column": long}))
    assert fields.integers("column", len(values) * 100).tolist() == values * 100
    assert len(long) <= 1 + len(values) * 800


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=24),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: words(*values)),
    st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers(0, 3)), max_size=4),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
)


@given(st.sampled_from(sorted(msgpack.unpackb(sample().to_bytes()))), odd)
@settings(deadline=None, max_examples=examples(300))
def test_a_changed_field_is_harmless(field: str, value: object) -> None:
    fields = msgpack.unpackb(sample().to_bytes())
    fields[field] = value
    _harmless(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ndim", words(2, 0, 2**60)),
        ("ndim", words(2, 0, -1)),
        ("shape", words(4, 3, -16)),
        ("shape", words(4, 3)),
        ("dtype", words(0, 0, 10_000)),
        ("dtype", b""),
        ("dtype", b"\x03" + bytes(9)),
        ("section", words(0, 0, 7)),
        ("section", words(0, 0, 0)),
        ("own", b"\0"),
        ("held", words(3, 1, 0)),
        ("held", words(1, 2, 0)),
        ("held", words(-1, 1, 1)),
        ("layouts", [words(2, 3)]),
        ("layouts", [words(2, 0), words(1, 1, 0)]),
        ("layouts", [words(2, 3), words(1, 2, 0)]),
        ("layouts", [words(2, 3), words(1, 0, 1, 0)]),
        ("layouts", [words(2, 3), words(3, 0)]),
        ("names", ["model.w", "model.w", "rng.state"]),
        ("names", ["model.w", b"model.scale", "rng.state"]),
        ("dtypes", ["float32"]),
        ("value_path", [b"one"]),
        ("value_per_rank", b"\0"),
        ("aliases", ["half"]),
        ("kind", "other"),
    ],
)
def test_a_field_that_breaks_a_rule_is_refused(field: str, value: object) -> None:
    fields = msgpack.unpackb(sample().to_bytes())
    fields[field] = value
    with pytest.raises(PlanError, match="malformed plan table"):
        PlanTable.from_bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("tensor", "offsets", "lengths"),
    [
        ([0, 1, 3], [0, 0, 0], [4, 3, 1]),
        ([0, 1, -1], [0, 0, 0], [4, 3, 1]),
        ([0], [0, 0], [4]),
        ([0], [0, 0], [4, 2**63 - 1]),
        ([0], [0, -1], [4, 3]),
        ([0], [0], [4]),
    ],
)
def test_boxes_that_break_a_rule_are_refused(tensor: list[int], offsets: list[int], lengths: list[int]) -> None:
    data = wire.pack_words(*(np.array(values, np.int64) for values in (tensor, offsets, lengths)))
    with pytest.raises(PlanError, match="malformed boxes"):
        unpack_boxes([pack_boxes(boxes()), data], sample().tensors)


def test_words_of_no_known_width_are_refused() -> None:
    data = bytearray(wire.pack_words(np.arange(6)))
    assert data[0] == 1
    data[0], data[1] = 3, 2
    with pytest.raises(PlanError, match="malformed test"):
        wire.unpack_words("test", [bytes(data)], 1)


numbers = st.lists(st.sampled_from([0, 1, 255, 256, 2**16, 2**32 - 1, 2**32, 2**62, -1]), max_size=4)


@given(st.lists(st.tuples(numbers, numbers), max_size=5))
@settings(deadline=None)
def test_columns_of_many_peers_are_joined(messages: list[tuple[list[int], list[int]]]) -> None:
    packed = [wire.pack_words(*(np.array(values, np.int64) for values in one)) for one in messages]
    for at, (values, lengths) in enumerate(wire.unpack_words("test", packed, 2)):
        assert values.tolist() == [number for one in messages for number in one[at]]
        assert lengths.tolist() == [len(one[at]) for one in messages]


@given(st.lists(numbers, max_size=5))
@settings(deadline=None)
def test_many_columns_are_packed_as_each_alone(parts: list[list[int]]) -> None:
    starts = np.cumsum([0, *map(len, parts)])
    joined = np.array([number for part in parts for number in part], np.int64)
    packed = wire.pack_columns(joined, starts)
    fields = wire.Fields("test", wire.pack_message("test", {"parts": packed}))
    assert [column.tolist() for column in fields.columns("parts", len(parts))] == parts
    for part, data in zip(parts, packed):
        assert data[0] == wire.pack_column(np.array(part * 100, np.int64))[0] if part else data == b"\x01"
