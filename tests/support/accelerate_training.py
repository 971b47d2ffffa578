"""A tiny training loop with Accelerate, on one rank or several."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.accelerate import state_of

__all__ = ["train"]

BATCHES = 24
"""Batches of one epoch, of all ranks together; each has two rows."""


class Counter:
    """An object that is registered for checkpointing."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(
    rank: int,
    world_size: int,
    port: int,
    root: str,
    every: int,
    kill_at: int | None,
    accumulation: int,
    native: str | None = None,
) -> dict[str, Any]:
    """Train one epoch, save every so many iterations, and return losses and rates by the global batch.

    ``native`` is a folder of ``Accelerator.save_state``: if it exists, the training continues from there; otherwise it
    is written at the first save.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    try:
        return _train(world_size, root, every, kill_at, accumulation, native)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _train(
    world_size: int, root: str, every: int, kill_at: int | None, accumulation: int, native: str | None
) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / BATCHES)
    rows = torch.randn(BATCHES * 2, 5, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(rows, batch_size=2, shuffle=False)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter, app = Counter(), state_of(accelerator)
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(5 + accelerator.process_index)
    found: dict[str, Any] = {"losses": {}, "rates": {}}
    with bcp.CheckpointManager(root, cadence=every, preemption=None) as manager:
        if native is not None and Path(native).exists():
            bcp.load(native, app)
            native = None
        else:
            manager.resume(app)
        first = counter.count // world_size
        batches = accelerator.skip_first_batches(loader, first)
        for iteration, batch in enumerate(batches, first + 1):
            app.load_late()
            with accelerator.accumulate(model):
                loss = (model(batch[:, :4]) - batch[:, 4:]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.count = iteration * world_size
            found["losses"][counter.count] = loss.item()
            found["rates"][counter.count] = scheduler.get_last_lr()[0]
            if iteration == kill_at:
                manager.wait()
                if accelerator.is_last_process:
                    os.kill(os.getpid(), signal.SIGKILL)
            manager.save(counter.count, app)
            if native is not None and iteration == every:
                accelerator.save_state(native)
    found["sum"] = sum(one.detach().double().sum().item() for one in model.parameters())
    return found
