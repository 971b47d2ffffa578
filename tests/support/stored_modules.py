"""Plain torch modules that have the parameters of a checkpoint, for loads without the framework that wrote it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bytecheckpoint as bcp


def stored_module(path: str) -> nn.Module:
    """A module in float32 with the names and shapes of the model in a checkpoint, full of NaN."""
    root = nn.Module()
    checkpoint = bcp.open(path)
    for name in checkpoint:
        if name.startswith("model."):
            *parents, leaf = name.split(".")[1:]
            module = root
            for part in parents:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, nn.Parameter(torch.full(checkpoint[name].shape, float("nan"))))
    return root


def two_groups(module: nn.Module) -> torch.optim.AdamW:
    """An optimizer with one group for vectors and one for matrices, as Megatron makes."""
    groups = [[p for p in module.parameters() if (p.ndim > 1) is matrices] for matrices in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups])


def full_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters as ``/master``, their state and the options of their groups, all global. A collective."""
    full: dict[str, Any] = {}
    params = dict(module.named_parameters())
    for name, param in params.items():
        for key, value in {"master": param, **optimizer.state[param]}.items():
            full[f"{name}/{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    for group in optimizer.param_groups:
        for name, param in params.items():
            if any(param is other for other in group["params"]):
                full.update({f"{name}/{key}": torch.tensor(group[key]) for key in ("lr", "weight_decay")})
    return full
