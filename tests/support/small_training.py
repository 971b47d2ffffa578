"""A training state of a few hundred bytes, plain or sharded, that ``value`` determines completely."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def plain_model(value: float = 1.0) -> nn.Module:
    """Return two layers and a buffer whose elements count up from ``value``."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    number = value
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + number)
            number += 100
    return model


def stepped(model: nn.Module, steps: int = 1, lr: float = 0.5) -> torch.optim.Optimizer:
    """Return an AdamW after ``steps`` steps with gradients that are equal in every layout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 0.5 + 0.25).clone()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def training(value: float = 1.0, *, steps: int = 1, shard: bool = False) -> dict[str, Any]:
    """Return model, optimizer and a tree of values and tensors; ``shard`` applies FSDP-2 to the model."""
    model = plain_model(value)
    if shard and dist.is_initialized():
        fully_shard(model)
    tree = {"step": int(value), "name": "run", "table": torch.arange(6.0) * value, "best": [value, None, (1, "two")]}
    return {"model": model, "optimizer": stepped(model, steps), "extra_state": tree}


def memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return copies of all full tensors and values of a state, for later comparison."""
    held: dict[str, Any] = {}
    for name, tensor in state["model"].state_dict().items():
        held[f"model.{name}"] = _full(tensor)
    optimizer = state["optimizer"].state_dict()
    for number, entries in optimizer["state"].items():
        for key, entry in entries.items():
            held[f"optimizer.{number}.{key}"] = _full(entry) if torch.is_tensor(entry) else entry
    held["optimizer.groups"] = copy.deepcopy(optimizer["param_groups"])
    for key, entry in state["extra_state"].items():
        held[f"extra_state.{key}"] = entry.clone() if torch.is_tensor(entry) else copy.deepcopy(entry)
    return held


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    bad = set(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if torch.is_tensor(a) and torch.is_tensor(b):
            same = a.dtype == b.dtype and torch.equal(a, b)
        else:
            same = type(a) is type(b) and a == b
        if not same:
            bad.add(name)
    return sorted(bad)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
