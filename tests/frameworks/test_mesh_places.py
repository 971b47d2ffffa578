"""From a rank's place in a mesh, any other rank computes what it holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import PlanError
from bytecheckpoint.frameworks.placements import MeshSharding
from bytecheckpoint.frameworks.tensors import tensor_shards
from bytecheckpoint.planners.plan_groups import mesh_boxes, mesh_members
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.shards import MeshShard
from bytecheckpoint.testing.ranks import RankPool


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """Shapes of a tensor and a mesh, and placements, including strided ones."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for position in range(len(mesh)):
        dim = draw(st.integers(0, len(shape) - 1))
        after = draw(st.sampled_from(mesh[position + 1 :])) if mesh[position + 1 :] else 1
        kinds: list[Any] = [Replicate(), ShardPlacement(dim), _StridedShard(dim, split_factor=after)]
        placements.append(kinds[draw(st.integers(0, 2))])
    return shape, mesh, placements


@given(cut_tensors())
@settings(deadline=None, max_examples=examples(300))
def test_boxes_of_all_ranks_at_once_match_those_of_each_rank(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Any]],
) -> None:
    shape, mesh, placements = case
    cuts = MeshSharding(shape, mesh, (0,) * len(mesh), tuple(placements)).cut_order()
    if cuts is None:
        return
    coordinates = list(product(*(range(size) for size in mesh)))
    offsets, lengths = mesh_boxes(MeshLayout(mesh, cuts), shape, np.array(coordinates))
    for row, coordinate in enumerate(coordinates):
        expected = [part.box for part in MeshSharding(shape, mesh, coordinate, tuple(placements)).held()[1]]
        found = Box(tuple(offsets[row].tolist()), tuple(lengths[row].tolist()))
        assert ([found] if found.numel else []) == expected


def test_order_of_cuts() -> None:
    def cut_order(shape: tuple[int, ...], *placements: Any) -> tuple[tuple[int, ...], ...] | None:
        return MeshSharding(shape, (2, 3), (0, 0), placements).cut_order()

    shard = ShardPlacement(0)
    assert cut_order((4, 4), Replicate(), shard) == ((1,), ())
    assert cut_order((4,), shard, shard) == ((0, 1),)
    assert cut_order((4,), _StridedShard(0, split_factor=3), shard) == ((1, 0),)
    assert cut_order((4,), _StridedShard(0, split_factor=2), shard) is None


def test_members_of_a_mesh() -> None:
    layout = MeshLayout((2, 3), ((1,),))
    ranks, coordinates = np.array([3, 4, 7, 9]), np.array([[0, 1], [1, 2], [1, 1], [0, 2]])
    found = mesh_members(layout, ranks, coordinates)
    assert found.ranks.tolist() == [3, 7, 4, 9]
    assert found.starts.tolist() == [0, 2, 4]
    assert found.coordinates[:, 1].tolist() == [1, 2]
    with pytest.raises(PlanError, match="1 dimensions"):
        mesh_boxes(layout, (3, 4), coordinates)


@pytest.mark.parametrize(
    ("shape", "cuts"), [((2,), ((1,),)), ((2,), ((0,), (0,))), ((2,), ((0, 0),)), ((0,), ((),)), ((2,), ((-1,),))]
)
def test_placements_without_a_layout(shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="mesh"):
        MeshLayout(shape, cuts)


def _places(rank: int, world_size: int) -> list[tuple[Any, Any, Any, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t"))
    layer = torch.nn.Linear(6, 8)
    parallelize_module(layer, mesh["t"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["d"])
    tensors: list[Any] = [
        layer.weight,
        distribute_tensor(torch.zeros(7, 5), mesh, [ShardPlacement(0), ShardPlacement(1)]),
        distribute_tensor(torch.zeros(7, 5), mesh["t"], [ShardPlacement(0)]),
        distribute_tensor(torch.zeros(9, 2), mesh, [ShardPlacement(0), ShardPlacement(0)]),
    ]
    found: list[tuple[Any, Any, Any, Any]] = []
    for tensor in tensors:
        metas, (shard,) = tensor_shards("x", tensor)
        assert isinstance(shard, MeshShard)
        place = shard.find_place()
        assert place is not None
        found.append((place.layout, place.coordinate, metas["x"].shape, tuple(shard.box)))
    return found


def test_places_of_real_tensors_match_their_boxes(rank_pool: RankPool) -> None:
    results = rank_pool.run(_places, world_size=4)
    for of_tensor in zip(*results):
        assert len({layout for layout, *_ in of_tensor}) == 1
        for layout, coordinate, shape, box in of_tensor:
            offsets, lengths = mesh_boxes(layout, shape, np.array([coordinate]))
            assert (tuple(offsets[0].tolist()), tuple(lengths[0].tolist())) == box
