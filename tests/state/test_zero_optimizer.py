"""``ZeroRedundancyOptimizer`` is one global optimizer: it saves and loads at any world size, like a plain one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing.ranks import RankPool


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters())},
        {"params": [*model.second.parameters(), model.unused], "lr": 0.5},
    ]


def plain(model: Net, lr: float) -> optim.Optimizer:
    return optim.Adam(groups(model), lr=lr, amsgrad=True)


def zero(params: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's module uses torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(params, optim.Adam, **options)


def train(model: Net, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def weights(model: Net) -> dict[str, list[Any]]:
    return {name: tensor.detach().flatten().tolist() for name, tensor in model.named_parameters()}


def expected() -> dict[str, list[Any]]:
    """The weights after six steps of a plain optimizer that was never saved."""
    model = Net()
    optimizer = plain(model, 0.1)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.05
    train(model, optimizer, range(3, 6))
    return weights(model)


def _start(rank: int, world_size: int, path: str) -> None:
    model = Net()
    optimizer = zero(groups(model), lr=0.1, amsgrad=True)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.05  # a scheduler's: the optimizers inside do not have it yet
    bcp.save(path, {"model": model, "optimizer": optimizer})
    owned = len(optimizer.optim.state)
    assert world_size == 1 or 0 < owned < 4, "each rank must have the state of some parameters only"


def _continue(rank: int, world_size: int, source: str, target: str | None, strict: str) -> dict[str, list[Any]]:
    """Load into an optimizer that has never been used, save again, and make three more steps."""
    model = Net(seed=7)
    optimizer = zero(groups(model), lr=0.9, amsgrad=True)
    report = bcp.load(source, {"model": model, "optimizer": optimizer}, strict=strict)
    assert not report.lazy
    assert not report.missing
    if target is not None:
        bcp.save(target, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    return weights(model)


def _continue_plain(source: str, target: str | None = None) -> dict[str, list[Any]]:
    model = Net(seed=7)
    optimizer = plain(model, 0.9)
    bcp.load(source, {"model": model, "optimizer": optimizer}, strict="exact")
    if target is not None:
        bcp.save(target, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    return weights(model)


@pytest.mark.parametrize("strict", ["strict", "exact"])
def test_two_ranks_one_rank_two_ranks_and_plain(strict: str, rank_pool: RankPool, tmp_path: Path) -> None:
    two, one, again, back = (str(tmp_path / name) for name in ("two", "one", "again", "back"))
    rank_pool.run(_start, two, world_size=2)
    stored = bcp.open(two)
    assert stored["optimizer.state.first.weight.max_exp_avg_sq"].load().count_nonzero()
    assert _continue_plain(two) == expected()
    assert rank_pool.run(_continue, two, one, strict, world_size=1) == [expected()]
    assert rank_pool.run(_continue, one, again, strict, world_size=2) == [expected()] * 2
    assert _continue_plain(again, back) == expected()
    assert rank_pool.run(_continue, back, None, strict, world_size=2) == [expected()] * 2


def _reload(rank: int, world_size: int, path: str) -> dict[str, list[Any]]:
    """Load into an optimizer that has state already."""
    model = Net(seed=7)
    optimizer = zero(groups(model), lr=0.9, amsgrad=True)
    train(model, optimizer, range(20, 22))
    bcp.load(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    return weights(model)


def test_existing_state_is_replaced(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_pool.run(_start, path, world_size=2)
    assert rank_pool.run(_reload, path, world_size=2) == [expected()] * 2


def _replicated(rank: int, world_size: int, path: str) -> dict[str, list[Any]]:
    """Two groups of one rank each, as in hybrid sharding: both hold the state of every parameter."""
    group = [dist.new_group([other]) for other in range(world_size)][rank]
    model = Net()
    optimizer = zero(groups(model), process_group=group, lr=0.1, amsgrad=True)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.05
    bcp.save(path, {"model": model, "optimizer": optimizer})
    return weights(model)


def test_replicas_are_stored_once(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_pool.run(_replicated, path, world_size=2)
    assert not any("@" in name for name in bcp.open(path))
    assert _continue_plain(path) == expected()


def _overlapping(rank: int, world_size: int, path: str) -> str:
    model = Net()
    optimizer = zero(model.parameters(), overlap_with_ddp=True, lr=0.1)
    with pytest.raises(errors.StateError) as caught:
        bcp.save(path, {"model": model, "optimizer": optimizer})
    return str(caught.value)


def test_overlap_is_refused_by_name(rank_pool: RankPool, tmp_path: Path) -> None:
    for text in rank_pool.run(_overlapping, str(tmp_path / "c"), world_size=2):
        assert "ZeroRedundancyOptimizer with overlap_with_ddp=True" in text


def test_the_state_dict_of_a_plain_optimizer(rank_pool: RankPool, tmp_path: Path) -> None:
    model = Net()
    optimizer = plain(model, 0.1)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.05
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    assert rank_pool.run(_continue, str(tmp_path), None, "exact", world_size=2) == [expected()] * 2
