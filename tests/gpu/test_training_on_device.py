"""Train on a device, save, and continue from what was saved: FSDP-2 over NCCL, the Trainer, Lightning.

In a dry run, the same with gloo on the CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

WAIT_S = time_limit(60)
KINDS = {
    "synchronous": {},
    "asynchronous": {"async_save": True},
    "gated": {"async_save": True, "options": bcp.SaveOptions(gate=True)},
}


@pytest.fixture
def group(tmp_path: Path, device: torch.device) -> Iterator[None]:
    """A process group of this process alone, of the device's own backend and no other."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _training(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, optimizer, seed)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    parameter = next(model.parameters())
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(parameter.device)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [one for state in optimizer.state.values() for one in state.values()]
    local = [getattr(one, "to_local", lambda one=one: one)() for one in [*model.parameters(), *kept]]
    return [one.detach().clone() for one in local]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(tmp_path: Path, device: torch.device, kind: str) -> None:
    """The next step may follow at once, and what is loaded is where it was on the device."""
    model, optimizer = _training(device, 0)
    expected = _tensors(model, optimizer)
    options: dict[str, Any] = KINDS[kind]
    handle = bcp.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, **options)
    _step(model, optimizer, 2)
    handle.result(WAIT_S)
    other, its_optimizer = _training(device, 1)
    bcp.load(tmp_path / "saved", {"model": other, "optimizer": its_optimizer})
    found = _tensors(other, its_optimizer)
    assert [one.device for one in found] == [one.device for one in expected]
    assert all(map(torch.equal, found, expected))


def test_the_trainer(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("peft", reason="transformers and peft are not installed")
    from trainer_training import train

    options = {"use_cpu": device.type == "cpu"}
    whole = train(tmp_path / "whole", resume=False, **options)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", resume=False, signalled=(5, signal.SIGINT), **options)
    resumed = train(tmp_path / "broken", **options)
    assert resumed["losses"] == whole["losses"]
    assert resumed["sums"] == whole["sums"]


def test_lightning(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    from lightning_training import train

    accelerator = "gpu" if device.type == "cuda" else "cpu"
    whole = train(0, 1, tmp_path / "whole", "single", resume=False, accelerator=accelerator)
    train(0, 1, tmp_path / "broken", "single", resume=False, steps=5, accelerator=accelerator)
    resumed = train(0, 1, tmp_path / "broken", "single", accelerator=accelerator)
    assert resumed.losses.items() <= whole.losses.items()
    assert resumed.sums == whole.sums
