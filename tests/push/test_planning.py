"""Plans compared with brute force, and layouts."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import MismatchError, PlanError
from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.inference.push.layout import ALIGNMENT_BYTES, ChunkTarget, Holding, Layout
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.plan import Plan, check_taken_whole, plan_push
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]


@st.composite
def _box(draw: Any, shape: tuple[int, ...]) -> Box:
    ranges = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        ranges.append((begin, draw(st.integers(1, size - begin))))
    return Box(tuple(begin for begin, _ in ranges), tuple(length for _, length in ranges))


@st.composite
def _cases(draw: Any) -> tuple[tuple[int, ...], list[list[TensorBox]], list[Holding], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    senders = draw(st.integers(1, 4))
    some = st.sets(st.integers(0, senders - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    held = {draw(_box(shape)): draw(some) for _ in range(draw(st.integers(0, 6)))}
    parts = [
        [
            TensorBox("w", shape, draw(_box(shape)), draw(st.sampled_from([F32, BF16])))
            for _ in range(draw(st.integers(0, 3)))
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]
    chunk = draw(st.sampled_from([1, 8, 24, 1 << 20]))
    return shape, parts, [Holding(box, owners) for box, owners in held.items()], senders, chunk


@settings(max_examples=examples(400), deadline=None)
@given(_cases())
def test_every_requested_element_is_written_once_by_a_holder(
    case: tuple[tuple[int, ...], list[list[TensorBox]], list[Holding], int, int],
) -> None:
    shape, requested, held, senders, chunk_bytes = case
    there = np.zeros(shape, bool)
    for box, _ in held:
        there[box.slices()] = True
    if not all(there[part.box.slices()].all() for parts in requested for part in parts):
        with pytest.raises(PlanError, match="w: no sender has"):
            plan_push(requested, {"w": held} if held else {}, senders, chunk_bytes=chunk_bytes)
        return
    plan = plan_push(requested, {"w": held}, senders, chunk_bytes=chunk_bytes)
    _check(plan, shape, requested, held, chunk_bytes)
    assert plan == plan_push(requested, {"w": held[::-1]}, senders, chunk_bytes=chunk_bytes)


def _check(
    plan: Plan, shape: tuple[int, ...], requested: list[list[TensorBox]], held: list[Holding], chunk_bytes: int
) -> None:
    values = np.arange(math.prod(shape)).reshape(shape)
    arenas = [np.full(layout.nbytes, -1) for layout in plan.layouts]
    written = [np.zeros(len(layout.chunks), int) for layout in plan.layouts]
    for sender, writes in enumerate(plan.writes):
        for write in writes:
            assert any(sender in owners and box.contains(write.box) for box, owners in held)
            assert write.nbytes <= chunk_bytes or write.box.numel == 1
            for target, chunk, *_ in write.places:
                layout = plan.layouts[target]
                part, box = layout.chunks[chunk]
                assert (box, layout.parts[part].dtype) == (write.box, write.dtype)
                written[target][chunk] += 1
                begin = layout.offsets[chunk]
                assert begin % ALIGNMENT_BYTES == 0
                place = arenas[target][begin : begin + box.numel]
                assert (place == -1).all()
                place[:] = values[box.slices()].ravel()
    for target, parts in enumerate(requested):
        assert (written[target] == 1).all()
        layout = plan.layouts[target]
        assert layout == Layout.unpack(layout.packed)
        for number, part in enumerate(parts):
            found = np.full(shape, -1)
            for chunk, (of, box) in enumerate(layout.chunks):
                if of == number:
                    assert part.box.contains(box)
                    begin = layout.offsets[chunk]
                    found[box.slices()] = arenas[target][begin : begin + box.numel].reshape(box.lengths)
            assert (found[part.box.slices()] == values[part.box.slices()]).all()


def test_replicas_are_spread_by_bytes() -> None:
    shape = (64, 1024)
    parts = [[TensorBox(f"w{n}", shape, Box.whole(shape), F32) for n in range(13)]]
    held = {f"w{n}": [Holding(Box.whole(shape), (0, 1, 2, 3))] for n in range(13)}
    plan = plan_push(parts, held, 4, chunk_bytes=1 << 16)
    loads = [sum(write.nbytes for write in writes) for writes in plan.writes]
    assert max(loads) - min(loads) <= 1 << 16


def test_a_shared_chunk_is_cast_once() -> None:
    shape = (8, 8)
    part = TensorBox("norm", shape, Box.whole(shape), BF16)
    plan = plan_push([[part]] * 5, {"norm": [Holding(Box.whole(shape), (0,))]}, 1)
    ((write,),) = plan.writes
    assert write.places == tuple(ChunkTarget(target, 0) for target in range(5))


def test_the_error_names_the_missing_range() -> None:
    shape = (8, 4)
    part = TensorBox("w", shape, Box((2, 0), (4, 4)), F32)
    held = {"w": [Holding(Box((0, 0), (4, 4)), (0,)), Holding(Box((5, 0), (3, 4)), (1,))]}
    with pytest.raises(PlanError, match=re.escape("w: no sender has [4:5,0:4] of shape [8, 4]")):
        plan_push([[part]], held, 2)


def test_an_engine_must_request_a_tensor_completely_or_not_at_all() -> None:
    meta = BasicMeta(F32, (8, 4))
    halves = [[TensorBox("w", (8, 4), Box((at, 0), (4, 4)), F32)] for at in (0, 4)]
    table = Table((("w", meta), ("unused", meta)))
    check_taken_whole("engine", table, halves)
    with pytest.raises(MismatchError, match=re.escape("w: it is float32[8, 4], of which the engine uses 16 of 32")):
        check_taken_whole("engine", table, halves[:1])
