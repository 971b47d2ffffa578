from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bytecheckpoint.dtypes import DTYPES
from bytecheckpoint.errors import PlanError
from bytecheckpoint.geometry import Box
from bytecheckpoint.metadata import BasicMeta
from bytecheckpoint.planners import Assignment, LocalPlan, ValueEntry, plan_save, wire
from bytecheckpoint.tables import BoxTable, TensorTable


def sample() -> LocalPlan:
    tensors = TensorTable.build(
        [
            ("model", "w", BasicMeta(DTYPES["bfloat16"], (4, 3))),
            ("model", "scale", BasicMeta(DTYPES["float32"], ())),
            ("rng", "state@0", BasicMeta(DTYPES["uint8"], (16,))),
        ]
    )
    shards = BoxTable.build([(1, Box((), ())), (0, Box((0, 0), (4, 3))), (2, Box((0,), (16,)))])
    values = [ValueEntry("extra", b"\x00step", b"digest", 9), ValueEntry("extra", b"", b"", 0, per_rank=True)]
    return LocalPlan(
        tensors, shards, values, np.array([-1, -1, 0]), [("model.tied", "model.w")], [("model", "ddp"), ("rng", "tree")]
    )


def assert_same(a: LocalPlan, b: LocalPlan) -> None:
    assert (a.tensors.names, a.tensors.sections) == (b.tensors.names, b.tensors.sections)
    for column in ("section", "dtype", "ndim", "shape"):
        assert getattr(a.tensors, column).tolist() == getattr(b.tensors, column).tolist()
    for column in ("tensor", "offsets", "lengths", "starts"):
        assert getattr(a.shards, column).tolist() == getattr(b.shards, column).tolist()
    assert (a.values, a.aliases, a.sections) == (b.values, b.aliases, b.sections)
    assert a.scopes().tolist() == b.scopes().tolist()


def test_a_plan_survives_the_wire() -> None:
    assert_same(LocalPlan.from_bytes(sample().to_bytes()), sample())
    nothing = LocalPlan(TensorTable.build([]), BoxTable.build([]))
    assert_same(LocalPlan.from_bytes(nothing.to_bytes()), nothing)


def test_what_came_over_the_wire_may_be_changed() -> None:
    plan = LocalPlan.from_bytes(sample().to_bytes())
    plan.tensors.shape[0] = 9
    plan.shards.offsets[0] = 9


rows = st.lists(st.integers(0, 2**40), max_size=5).map(lambda values: np.array(values, np.int64))


@given(st.lists(st.tuples(st.text(max_size=5), rows), max_size=3), st.lists(st.booleans(), max_size=5))
@settings(deadline=None)
def test_an_assignment_survives_the_wire(files: list[tuple[str, Any]], shared: list[bool]) -> None:
    told = Assignment(files, np.arange(len(shared)), np.array(shared, np.bool_))
    found = Assignment.from_bytes(told.to_bytes())
    assert [(section, part.tolist()) for section, part in found.files] == [(s, part.tolist()) for s, part in files]
    assert found.values.tolist() == list(range(len(shared)))
    assert found.shared.tolist() == shared


def test_an_assignment_must_speak_of_what_the_rank_holds() -> None:
    plan = sample()
    for told in (
        Assignment([("model", np.array([0, 3]))], np.array([0]), np.array([True])),
        Assignment([("model", np.array([0, 1]))], np.array([2]), np.array([True])),
        Assignment([("model", np.array([-1]))], np.array([0]), np.array([True])),
    ):
        with pytest.raises(PlanError, match="malformed save assignment"):
            Assignment.from_bytes(told.to_bytes(), plan)


def test_every_cut_is_refused() -> None:
    for good, read in ((sample().to_bytes(), LocalPlan.from_bytes), (_told().to_bytes(), Assignment.from_bytes)):
        for end in range(len(good)):
            with pytest.raises(PlanError, match="malformed"):
                read(good[:end])
        with pytest.raises(PlanError, match="malformed"):
            read(good + b"\0")


def _told() -> Assignment:
    return Assignment([("model", np.array([0, 1]))], np.array([0]), np.array([True]))


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(PlanError, match="malformed local plan"):
        LocalPlan.from_bytes(_told().to_bytes())
    with pytest.raises(PlanError, match="malformed save assignment"):
        Assignment.from_bytes(sample().to_bytes())


def _harmless(data: bytes) -> None:
    """Either refused, or a plan like any other: nothing but ``PlanError`` comes of it."""
    with suppress(PlanError):
        plan_save([LocalPlan.from_bytes(data), sample()])
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
@settings(deadline=None, max_examples=300)
def test_changed_bytes_are_harmless(data: st.DataObject) -> None:
    changed = bytearray(sample().to_bytes())
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
    column = wire.column(np.array(values, np.int64))
    fields = wire.Fields("test", wire.pack("test", {"column": column}))
    assert fields.integers("column", len(values)).tolist() == values
    assert len(column) == 1 or len(column) - 1 <= len(values) * 8


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
@settings(deadline=None, max_examples=300)
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
        ("shard_tensor", words(0, 1, 3)),
        ("offsets", words(0, 0)),
        ("lengths", words(4, 3, 2**63 - 1)),
        ("scope", words(-1, -1)),
        ("names", ["model.w", "model.w", "rng.state@0"]),
        ("names", ["model.w", b"model.scale", "rng.state@0"]),
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
    with pytest.raises(PlanError, match="malformed local plan"):
        LocalPlan.from_bytes(msgpack.packb(fields))
