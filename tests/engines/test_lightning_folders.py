"""Folders of Lightning's ``ModelParallelStrategy``: tensors as DCP stores them, and the rest in ``meta.pt``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("lightning")

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)


def _optimizers(net: Any, count: int) -> list[torch.optim.Optimizer]:
    parts = [net] if count == 1 else [net.first, net.last]
    return [torch.optim.AdamW(part.parameters(), lr=0.01 * (number + 1)) for number, part in enumerate(parts)]


def _schedulers(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]


def _train(rank: int, world_size: int, path: Path, count: int) -> dict[str, Any]:
    """Train on all ranks, save as Lightning does, and return the complete state."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "test"}
    warnings.simplefilter("ignore")
    seed_everything(3)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Net()
            self.automatic_optimization = False

        def configure_model(self) -> None:
            for part in (self.net.first, self.net.last):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            steps = (optimizers, schedulers) if count > 1 else ([optimizers], [schedulers])
            self.manual_backward(self.net.last(self.net.first(batch).relu()).square().mean())
            for optimizer, scheduler in zip(*steps, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizers = _optimizers(self.net, count)
            return optimizers, _schedulers(optimizers)

    strategy = ModelParallelStrategy(world_size, 1, save_distributed_checkpoint=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3 * count, **quiet)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2))
    trainer.save_checkpoint(path)
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.net.named_parameters()}
    names = {parameter: name for name, parameter in model.net.named_parameters()}
    state = {
        f"{names[parameter]}.{key}": value.full_tensor() if value.ndim else value
        for optimizer in trainer.optimizers
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    rates = [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]
    return {"model": whole, "state": state, "schedulers": rates}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2])
def test_a_sharded_folder(pool: RankPool, tmp_path: Path, count: int) -> None:
    expected = pool.run(_train, tmp_path / "last.ckpt", count)[0]
    net = nn.Module()
    net.add_module("net", _Net())
    optimizers = _optimizers(net.net, count)
    schedulers = _schedulers(optimizers)
    extra = {"epoch": 0, "global_step": 0}
    state = {"model": net, "optimizer": optimizers, "extra_state": extra}
    state["lr_scheduler"] = schedulers[0] if count == 1 else [one.state_dict() for one in schedulers]
    report = bcp.load(tmp_path / "last.ckpt", state, strict={"extra_state": False})
    assert (report.step, report.saved_world_size, report.missing) == (3 * count, 2, [])
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in net.net.named_parameters())
    names = {parameter: name for name, parameter in net.net.named_parameters()}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            assert all(torch.equal(value, expected["state"][f"{names[parameter]}.{k}"]) for k, value in entries.items())
    assert [one.param_groups[0]["lr"] for one in optimizers] == [one["_last_lr"][0] for one in expected["schedulers"]]
    found = [schedulers[0].state_dict()] if count == 1 else state["lr_scheduler"]
    assert found == expected["schedulers"]
    assert extra["global_step"] == 3 * count
    assert "fit_loop" in bcp.open(tmp_path / "last.ckpt").tree("loops")
