"""Create checkpoints for the tests of the command line, and inspect its results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layouts
import torch
from torch import nn

import bytecheckpoint as bcp


@dataclass
class CommandResult:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


class Tied(nn.Module):
    """A model with a tied parameter, several dtypes, 0-d and empty tensors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 6)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.coarse = nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("none", torch.zeros(0, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def save_one(path: Path, *, seed: int = 0, step: int = 5, lr: float = 0.25) -> Tied:
    """Save from one process, with optimizer state and plain values."""
    model = Tied(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {"step": step, "note": "hello", "ids": torch.arange(4)}}
    bcp.save(str(path), state, step=step, metadata={"run": "r1"})
    return model


def save_rank(rank: int, world_size: int, name: str, path: str) -> None:
    built = layouts.build(name, seed=1, steps=2)
    own = {"rank": bcp.PerRank(rank), "noise": bcp.PerRank(torch.full((2,), rank)), "half": bcp.PerRank(rank // 2)}
    bcp.save(path, {**built.state, "own": own}, step=7)


def tensors_of(path: object) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, by every name."""
    checkpoint = bcp.open(str(path))
    return {name: checkpoint[name].load() for name in checkpoint}


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert equal names, dtypes, shapes and bits."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert tensor.shape == b[name].shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def folder_contents(path: Path) -> list[str]:
    """Return every file below a folder, none if it does not exist."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
