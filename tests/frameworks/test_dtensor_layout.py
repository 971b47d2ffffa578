"""Compare the boxes of DTensors with brute force: an arange sharded like tensor parallelism and FSDP shard it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import UnsupportedTensorError
from bytecheckpoint.frameworks import dtensor
from bytecheckpoint.frameworks.dtensor import dtensor_boxes
from bytecheckpoint.frameworks.placements import LocalBox, MeshSharding
from bytecheckpoint.tensors.geometry import Box

SIZES = st.integers(0, 9)


def local_boxes(shape, mesh, coordinate, placements, **options):
    """The boxes of the rank at ``coordinate``."""
    return list(MeshSharding(shape, mesh, coordinate, tuple(placements), **options).held("w")[1])


def coordinates(mesh):
    return itertools.product(*(range(n) for n in mesh))


def cut_in_order(whole, mesh, coordinate, order):
    """Apply ``(mesh dim, tensor dim)`` cuts in order with torch.chunk, padded with empty pieces."""
    for mesh_dim, dim in order:
        pieces = list(torch.chunk(whole, mesh[mesh_dim], dim))
        empty = whole.narrow(dim, 0, 0)
        pieces += [empty] * (mesh[mesh_dim] - len(pieces))
        whole = pieces[coordinate[mesh_dim]]
    return whole


def read(whole, parts, local_shape):
    """The local tensor according to the boxes."""
    local = torch.full(local_shape, -1, dtype=whole.dtype)
    for part in parts:
        local[part.local_slices()] = whole[part.box.slices()]
    return local


def check_all(shape, mesh, placements, expected_of):
    """Check that boxes match the local tensors, and that the ranks together hold each element once per replica."""
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in coordinates(mesh):
        expected = expected_of(whole, coordinate)
        parts = local_boxes(shape, mesh, coordinate, placements)
        assert sum(part.box.numel for part in parts) == expected.numel()
        if expected.numel():
            assert torch.equal(read(whole, parts, expected.shape), expected)
        for part in parts:
            count[part.box.slices()] += 1
    replicas = int(np.prod([n for n, p in zip(mesh, placements) if isinstance(p, Replicate)]))
    assert torch.all(count == replicas)


@st.composite
def plain_layouts(draw):
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    return shape, mesh, dims


@given(plain_layouts())
@settings(deadline=None, max_examples=examples(150))
def test_shard_and_replicate_cut_left_to_right_like_chunk(layout):
    shape, mesh, dims = layout
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    order = [(i, dim) for i, dim in enumerate(dims) if dim is not None]
    check_all(shape, mesh, placements, lambda whole, at: cut_in_order(whole, mesh, at, order))


@st.composite
def fsdp_over_tp(draw):
    """FSDP (or HSDP) on one dim over TP (or EP and TP) on dims that may be the same one."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, len(shape) - 1)), min_size=1, max_size=2))
    hsdp = draw(st.booleans())
    mesh = [*([2] if hsdp else []), draw(st.integers(1, 4)), *(size for size, _ in inner)]
    fsdp = 1 if hsdp else 0
    factor = int(np.prod([size for size, d in inner if d == dim]))
    placements = [Replicate()] * fsdp + [_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)]
    placements += [Shard(d) for _, d in inner]
    order = [(fsdp + 1 + i, d) for i, (_, d) in enumerate(inner)] + [(fsdp, dim)]
    return shape, tuple(mesh), placements, order


@given(fsdp_over_tp())
@settings(deadline=None, max_examples=examples(200))
def test_fsdp_cuts_what_tensor_parallelism_left(layout):
    shape, mesh, placements, order = layout
    check_all(shape, mesh, placements, lambda whole, at: cut_in_order(whole, mesh, at, order))


def test_every_order_of_three_mesh_dims_that_a_split_factor_expresses():
    mesh = (2, 3, 2)
    for order in itertools.permutations(range(3)):
        factors = [
            int(np.prod([mesh[j] for j in order[: order.index(i)] if j > i], dtype=int)) for i in range(len(mesh))
        ]
        placements = [_StridedShard(0, split_factor=f) if f > 1 else Shard(0) for f in factors]
        steps = [(i, 0) for i in order]
        check_all((17, 2), mesh, placements, lambda whole, at, s=steps: cut_in_order(whole, mesh, at, s))


def test_explicit_shard_order_of_the_spec():
    mesh, order = (2, 3), [SimpleNamespace(tensor_dim=0, mesh_dims=(1, 0))]
    for at in coordinates(mesh):
        (part,) = local_boxes((7,), mesh, at, [Shard(0), Shard(0)], shard_order=order) or [
            LocalBox(Box((0,), (0,)), (0,))
        ]
        expected = cut_in_order(torch.arange(7), mesh, at, [(1, 0), (0, 0)])
        assert torch.equal(torch.arange(7)[part.box.slices()], expected)


@given(st.integers(1, 3), st.integers(2, 3), st.integers(2, 4), st.integers(0, 1), st.booleans())
@settings(deadline=None, max_examples=examples(60))
def test_interleaved_strided_shard_is_several_boxes(times, mesh_size, factor, dim, then_shard):
    """With a split factor that matches no mesh dimension, each rank has a piece of each of ``factor`` parts."""
    size = times * mesh_size * factor
    shape = (size, 3) if dim == 0 else (3, size)
    mesh = (mesh_size, 5) if then_shard else (mesh_size,)
    placements = [_StridedShard(dim, split_factor=factor), *([Shard(dim)] if then_shard else [])]

    def expected(whole, at):
        parts = torch.chunk(whole, factor, dim)
        own = torch.cat([torch.chunk(part, mesh_size, dim)[at[0]] for part in parts], dim)
        return cut_in_order(own, mesh, at, [(1, dim)] if then_shard else [])

    check_all(shape, mesh, placements, expected)


def test_interleaved_strided_shard_of_uneven_parts_is_refused():
    with pytest.raises(UnsupportedTensorError, match=r"w: .*split factor 2 .*9 elements"):
        local_boxes((9,), (2,), (0,), [_StridedShard(0, split_factor=2)])


def test_strided_shard_without_an_order_is_not_read_as_one():
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    with pytest.raises(UnsupportedTensorError, match="is ambiguous"):
        local_boxes((7,), (2, 2), (0, 0), placements, strided_is_order=False)


def test_partial_and_unknown_placements_are_refused_with_advice():
    with pytest.raises(UnsupportedTensorError, match=r"w: .*partial sum.*redistribute"):
        local_boxes((4,), (2,), (0,), [Partial()])
    strange = SimpleNamespace(is_partial=lambda: False)
    with pytest.raises(UnsupportedTensorError, match="is not supported"):
        local_boxes((4,), (2,), (0,), [strange])
    with pytest.raises(UnsupportedTensorError, match="dimension that a 1-d tensor does not have"):
        local_boxes((4,), (2,), (0,), [Shard(1)])


def test_rank_outside_the_mesh_holds_nothing():
    mesh = SimpleNamespace(get_coordinate=lambda: None)
    assert dtensor_boxes("w", SimpleNamespace(_spec=SimpleNamespace(mesh=mesh))) == ()


class _Spec(SimpleNamespace):
    """Has what ``dtensor_boxes`` asks of a ``DTensorSpec``."""


def _dtensor(coordinate):
    mesh = SimpleNamespace(shape=(2,), get_coordinate=lambda: (coordinate,))
    spec = _Spec(mesh=mesh, shape=(4, 3), placements=(Shard(0),))
    return SimpleNamespace(_spec=spec, _local_tensor=torch.zeros(2, 3), shape=(4, 3), placements=spec.placements)


def test_boxes_are_kept_as_long_as_their_spec():
    """A new spec at the address of an old one gets its own boxes, and nothing is left of specs that are gone."""
    dtensor._held_by_spec.clear()
    for turn in range(200):
        one = _dtensor(turn % 2)
        for _ in range(2):
            (part,) = dtensor_boxes("w", one)
            assert part.box == Box((2 * (turn % 2), 0), (2, 3))
        assert [held.refers_to() for held in dtensor._held_by_spec.values()] == [one._spec]
        del one
        assert dtensor._held_by_spec == {}


def test_a_local_tensor_that_changes_its_shape_is_refused():
    one = _dtensor(0)
    dtensor_boxes("w", one)
    one._local_tensor = torch.zeros(3, 3)
    with pytest.raises(UnsupportedTensorError, match=r"^w: .*should hold a local tensor of shape \[2, 3\]"):
        dtensor_boxes("w", one)


def test_scalars_and_negative_dims():
    assert local_boxes((), (2,), (1,), [Replicate()]) == [LocalBox(Box((), ()), ())]
    assert local_boxes((4, 4), (2,), (1,), [Shard(-1)]) == [LocalBox(Box((0, 2), (4, 2)), (0, 0))]
