"""A tiny training with the Trainer of Lightning, on one rank or several."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.integrations.lightning import (
    BcpCheckpointIO,
    BcpDDPStrategy,
    BcpModelParallelStrategy,
    BcpSingleDeviceStrategy,
)
from bytecheckpoint.storage_backends.local.backend import LocalBackend

__all__ = ["ROWS", "Trained", "train"]

ROWS = 48

_STRATEGIES: dict[str, Any] = {
    "single": lambda **given: BcpSingleDeviceStrategy(device="cpu", **given),
    "ddp": BcpDDPStrategy,
    "model-parallel": lambda **given: BcpModelParallelStrategy(
        data_parallel_size=_world_size(), tensor_parallel_size=1, **given
    ),
    "native": lambda: "auto",
    "native-parallel": lambda: ModelParallelStrategy(data_parallel_size=_world_size(), tensor_parallel_size=1),
}


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(ROWS):
            yield torch.full((5,), float(number))


class _Model(LightningModule):
    def __init__(self, *, is_sharded: bool, is_stream: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self._is_stream = is_stream
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self._is_sharded = is_sharded

    def configure_model(self) -> None:
        if self._is_sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))
        if self._is_stream:
            return StatefulDataLoader(_Stream(), batch_size=4)
        if _world_size() == 1:
            return StatefulDataLoader(rows, batch_size=4, shuffle=True)
        sampler: Any = DistributedSampler(rows, _world_size(), self.global_rank, seed=7)  # type: ignore[arg-type]
        return StatefulDataLoader(rows, batch_size=4, sampler=sampler)


class _Watch(Callback):
    """Notes losses, and what the optimizer did."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.rates: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses[trainer.global_step] = outputs["loss"].item()
        self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]


@dataclass
class Trained:
    """What can be compared after a training."""

    losses: dict[int, float]
    rates: dict[int, float]
    sums: dict[str, float]
    best: str
    callback: dict[str, float]


def train(
    rank: int,
    world_size: int,
    root: Path | str,
    kind: str,
    *,
    steps: int = 10,
    resume: str | bool = True,
    killed_in_save: int | None = None,
    checkpoints: Mapping[str, Any] | None = None,
    has_io: bool = False,
    is_stream: bool = False,
    fails_at: int | None = None,
    accelerator: str = "cpu",
    **callback: Any,
) -> Trained:
    """Train, and save every third step; with ``killed_in_save``, the last rank is killed in the save of this step.

    ``callback`` are arguments of ``ModelCheckpoint``.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "test"}
    warnings.simplefilter("ignore")  # the pool resets the filters
    seed_everything(3)
    strategy = _STRATEGIES[kind](**{"checkpoints": checkpoints} if "native" not in kind else {})
    if killed_in_save is not None:
        _kill_in_save(strategy, killed_in_save, is_last=rank == world_size - 1)
    if fails_at is not None:
        _fail_to_write(strategy, fails_at)
    watch = _Watch()
    saver = ModelCheckpoint(**{"dirpath": root, "every_n_train_steps": 3, "save_top_k": -1, **callback})
    trainer = Trainer(
        accelerator=accelerator,
        devices=1 if kind == "single" else world_size,
        strategy=strategy,
        max_steps=steps,
        callbacks=[watch, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[*([TorchElasticEnvironment()] if kind != "single" else []), *([BcpCheckpointIO()] if has_io else [])],
    )
    given = checkpoints or {}
    options = given.get("storage_options")
    if options is not None:
        fsspec.config.conf["s3"] = dict(options)  # for Lightning, which looks at the folder itself
    location = bcp.Location(root, tier=given.get("tier"), storage_options=options)
    newest = bcp.latest(location) if resume is True else None
    path = resume if isinstance(resume, str) else newest and newest.url
    model = _Model(is_sharded=kind in ("model-parallel", "native-parallel"), is_stream=is_stream)
    trainer.fit(model, ckpt_path=path or None)
    sums = {name: _whole(one).double().sum().item() for name, one in model.named_parameters()}
    best = {Path(name).name: one.item() for name, one in saver.best_k_models.items()}
    return Trained(watch.losses, watch.rates, sums, Path(saver.best_model_path).name, best)


def _kill_in_save(strategy: Any, step: int, *, is_last: bool) -> None:
    save = strategy.save_checkpoint

    def save_and_die(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if checkpoint["global_step"] == step and is_last and _world_size() > 1:
            strategy._finish()  # the save before is committed
            os.kill(os.getpid(), signal.SIGKILL)  # the others save
        save(checkpoint, *args, **kwargs)
        if checkpoint["global_step"] == step and is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    strategy.save_checkpoint = save_and_die


def _fail_to_write(strategy: Any, step: int) -> None:
    """Let the save of a step fail after it was staged."""
    save = strategy.save_checkpoint

    def save_and_fail(checkpoint: dict[str, Any], path: str, *args: Any, **kwargs: Any) -> None:
        if checkpoint["global_step"] != step:
            save(checkpoint, path, *args, **kwargs)
            return
        strategy._finish()  # the save before is committed
        with mock.patch.object(LocalBackend, "put", side_effect=StorageError("it fails here")):
            save(checkpoint, path, *args, **kwargs)
            strategy._handle.exception()

    strategy.save_checkpoint = save_and_fail


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = getattr(parameter, "full_tensor", None)
    return parameter.detach() if whole is None else whole().detach()
