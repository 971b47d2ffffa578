"""Folders as the Trainer of transformers writes them, with its own calls of torch and json."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Block", "optimizer_of", "write_trainer_folder"]


class Block(nn.Module):
    """Like a decoder: equal shapes of several matrices, norms and biases between them."""

    def __init__(self, seed: int, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.q = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(layers))
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for q, norm in zip(self.q, self.norms):
            hidden = hidden + norm(q(hidden))
        return self.head(hidden)


def optimizer_of(model: nn.Module, *, lr: float, decay: float = 0.1, groups: int = 2) -> torch.optim.Optimizer:
    """An optimizer with the two groups of ``Trainer.create_optimizer``, or one."""
    if groups == 1:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    params = dict(model.named_parameters())
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    decayed = [name for name in params if name not in norms and "bias" not in name]
    rest = [name for name in params if name not in decayed]
    return torch.optim.AdamW(
        [
            {"params": [params[name] for name in decayed], "weight_decay": decay},
            {"params": [params[name] for name in rest], "weight_decay": 0.0},
        ],
        lr=lr,
    )


def write_trainer_folder(folder: Path, state: dict[str, Any], *, step: int, ranks: int = 1) -> None:
    """Write ``model``, ``optimizer`` and ``lr_scheduler`` of ``state``, the generators, and the counters."""
    folder.mkdir(parents=True)
    torch.save(state["model"].state_dict(), folder / "pytorch_model.bin")
    torch.save(state["optimizer"].state_dict(), folder / "optimizer.pt")
    torch.save(state["lr_scheduler"].state_dict(), folder / "scheduler.pt")
    for rank in range(ranks):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
        torch.save(states, folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    torch.save(torch.nn.Linear(1, 1), folder / "training_args.bin")
    counters = {"global_step": step, "epoch": 0.5, "log_history": [{"loss": float("nan"), "step": 1}]}
    (folder / "trainer_state.json").write_text(json.dumps(counters))
