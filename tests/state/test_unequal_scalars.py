"""Save experts with different step counts: every rank keeps its ``step``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError
from bytecheckpoint.testing.ranks import RankPool


def _experts(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Module()
    mesh = init_device_mesh("cpu", (2,))
    module.experts = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(steps):
        module.experts.grad = module.experts.detach() + 1
        optimizer.step()
    return module, optimizer


def _save(rank: int, world_size: int, path: str, unequal: bool) -> None:
    module, optimizer = _experts(steps=2 + rank * unequal)
    bcp.save(path, {"model": module, "optimizer": optimizer})


def _load(rank: int, world_size: int, path: str) -> float:
    module, optimizer = _experts(steps=0)
    bcp.load(path, {"model": module, "optimizer": optimizer})
    return float(optimizer.state[module.experts]["step"])


def _load_whole(path: str, **rules: str) -> float:
    module = nn.Module()
    module.experts = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.Adam(module.parameters())
    bcp.load(path, {"model": module, "optimizer": optimizer}, options=rules)
    return float(optimizer.state[module.experts]["step"])


def test_each_rank_keeps_its_unequal_steps(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_pool.run(_save, path, True, world_size=2)
    assert rank_pool.run(_load, path, world_size=2) == [2.0, 3.0]
    with pytest.raises(MismatchError, match=r"experts\.step: saved by 2 rank\(s\), loaded by 1"):
        _load_whole(path)
    assert _load_whole(path, per_rank="lowest") == 2.0


def test_equal_steps_are_shared(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_pool.run(_save, path, False, world_size=2)
    assert _load_whole(path) == 2.0


def _save_some(rank: int, world_size: int, path: str) -> str:
    module, optimizer = _experts(steps=rank)
    with pytest.raises(bcp.errors.PlanError) as caught:
        bcp.save(path, {"model": module, "optimizer": optimizer})
    return str(caught.value)


def test_state_on_some_ranks_only_is_refused_with_advice(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_save_some, str(tmp_path / "c"), world_size=2)
    assert all("optimizer.state.experts.exp_avg" in text and "zero gradient" in text for text in results), results
