"""Compare layouts of local memory with brute force: every element of an arange carries its own position."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import PlanError
from bytecheckpoint.frameworks.layout import ParamLayout, ParamPart
from bytecheckpoint.tensors.geometry import Box, decompose, decompose_strided

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def cut_memory(draw, shape=shapes):
    """A layout that cuts row-major memory into boxes, and each global tensor as the memory position of its elements.

    The boxes are views with permuted dimensions, some of them split in two, at any place of a larger tensor. Some
    memory belongs to no part. A global tensor holds -1 where this rank holds nothing.
    """
    local_shape = draw(shape)
    memory = torch.arange(prod(local_shape)).reshape(local_shape)
    views = [memory]
    for _ in range(draw(st.integers(0, 3))):
        view = views.pop(draw(st.integers(0, len(views) - 1)))
        if view.ndim and view.numel():
            dim = draw(st.integers(0, view.ndim - 1))
            views += view.tensor_split([draw(st.integers(0, view.shape[dim]))], dim)
        else:
            views.append(view)
    if len(views) > 1 and draw(st.booleans()):
        views.pop()
    parts, wholes = [], {}
    for i, view in enumerate(views):
        view = view.permute(draw(st.permutations(range(view.ndim))))
        if view.ndim and view.shape[0] % 2 == 0 and draw(st.booleans()):
            view = view.unflatten(0, (2, view.shape[0] // 2))
        before = [draw(st.integers(0, 2)) for _ in view.shape]
        box = Box(tuple(before), tuple(view.shape))
        whole = torch.full([b + n + draw(st.integers(0, 1)) for b, n in zip(before, view.shape)], -1)
        whole[box.slices()] = view
        dense = view.is_contiguous() and draw(st.booleans())
        strides = None if dense else tuple(view.stride())
        parts.append(ParamPart(f"w{i}", tuple(whole.shape), box, view.storage_offset(), strides))
        wholes[f"w{i}"] = whole
    return ParamLayout(local_shape, tuple(parts), {fqn: tuple(t.shape) for fqn, t in wholes.items()}), wholes


def check(layout, wholes, flat, positions):
    """Check that ``flat``, which holds the memory ``positions``, is divided without gap or overlap."""
    found = {fqn: torch.full_like(whole, -1) for fqn, whole in wholes.items()}
    for part in layout.parts:
        assert part.box.numel
        assert torch.all(found[part.fqn][part.box.slices()] == -1)
        found[part.fqn][part.box.slices()] = part.view(flat)
    for fqn, whole in wholes.items():
        inside = torch.isin(whole, positions)
        assert torch.equal(found[fqn], torch.where(inside, whole, -1))


@given(cut_memory(), st.data())
@settings(deadline=None, max_examples=examples(300))
def test_a_flat_range_holds_exactly_its_elements(memory, data):
    layout, wholes = memory
    total = prod(layout.local_shape)
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    narrowed = layout.narrowed(start, length)
    assert (narrowed.local_shape, narrowed.fqns, narrowed.is_replica) == ((length,), layout.fqns, False)
    most = sum(max(1, 2 * len(part.shape) - 1) for part in layout.parts)
    assert len(narrowed.parts) <= most
    positions = torch.arange(start, start + length)
    check(narrowed, wholes, positions, positions)
    inside_a_buffer = torch.arange(start - 3, start + length + 5)[3 : 3 + length]
    check(narrowed, wholes, inside_a_buffer, positions)
    every_second = torch.stack([positions, -positions], 1)[:, 0]
    check(narrowed, wholes, every_second, positions)


@given(cut_memory(), st.data())
@settings(deadline=None, max_examples=examples(100))
def test_a_range_of_a_range_is_a_range(memory, data):
    layout, _ = memory
    total = prod(layout.local_shape)
    outer = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - outer))
    inner = data.draw(st.integers(0, length))
    rest = data.draw(st.integers(0, length - inner))
    twice = layout.narrowed(outer, length).narrowed(inner, rest)
    once = layout.narrowed(outer + inner, rest)
    flat = torch.arange(rest)

    def cells(found):
        return {
            (part.fqn, *(at + o for at, o in zip(index, part.box.offsets))): int(part.view(flat)[tuple(index)])
            for part in found.parts
            for index in torch.ones(part.box.lengths).nonzero().tolist()
        }

    assert cells(twice) == cells(once)


@given(cut_memory(), st.data())
@settings(deadline=None, max_examples=examples(100))
def test_ranges_of_all_ranks_cover_every_element_once(memory, data):
    layout, wholes = memory
    total = prod(layout.local_shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    count = {fqn: torch.zeros(whole.shape, dtype=torch.int64) for fqn, whole in wholes.items()}
    for start, stop in zip([0, *cuts], [*cuts, total]):
        for part in layout.narrowed(start, stop - start).parts:
            count[part.fqn][part.box.slices()] += 1
    for fqn, whole in wholes.items():
        assert torch.equal(count[fqn], (whole >= 0).long())


@given(shapes, st.data())
@settings(deadline=None)
def test_of_a_contiguous_tensor_strided_pieces_are_the_contiguous_ones(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    pieces = decompose_strided(start, length, shape, torch.empty(shape).stride())
    assert pieces == decompose(start, length, shape)


@pytest.mark.parametrize("spread", [1, 3])
def test_halves_of_a_fused_weight_stay_few_boxes(spread):
    """Columns of gate and up, one half of each per tensor-parallel rank: a range is at most three boxes per half."""
    rows, columns = 64, 8 * spread
    halves = [
        ParamPart(name, (rows, 16), Box((0, 8), (rows, 4)), at, (columns, 1)) for name, at in [("g", 0), ("u", 4)]
    ]
    layout = ParamLayout((rows, columns), tuple(halves), {"g": (rows, 16), "u": (rows, 16)})
    narrowed = layout.narrowed(columns + 2, 40 * columns)
    boxes = [(part.fqn, part.box.offsets, part.box.lengths, part.strides) for part in narrowed.parts]
    assert sorted(boxes) == [
        ("g", (1, 10), (1, 2), None),
        ("g", (2, 8), (39, 4), (columns, 1)),
        ("g", (41, 8), (1, 2), None),
        ("u", (1, 8), (40, 4), (columns, 1)),
    ]


def test_interleaved_and_shared_memory_are_refused():
    for lengths, strides in [((2, 3), (3, 2)), ((2, 2), (0, 1)), ((3,), (0,)), ((2, 2), (1, 1))]:
        with pytest.raises(PlanError, match="interleave"):
            decompose_strided(0, 4, lengths, strides)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1), (5, 2), (7, 0)])
def test_a_range_outside_the_local_memory_is_refused(start, length):
    with pytest.raises(PlanError, match=r"outside the 6 local elements of w"):
        ParamLayout.whole("w", (2, 3)).narrowed(start, length)


def test_a_part_outside_the_memory_raises():
    part = ParamPart("w", (4, 4), Box((0, 0), (4, 2)), 0, (4, 1))
    storage = torch.arange(100)
    assert part.view(storage[10:24]).tolist() == [[10, 11], [14, 15], [18, 19], [22, 23]]
    with pytest.raises(RuntimeError):
        part.view(storage[10:23])
