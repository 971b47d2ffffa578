"""The state that the failure matrix saves: every element encodes its save and its position."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointNotFoundError, NotACheckpointError

PREVIOUS, NEW, NEXT = 1.0, 2.0, 3.0
"""The value stored before the failure, by the failing call, and by the call after it."""

_SIZES = (5, 7, 6)
_TABLE = 11


class WrongLoad(AssertionError):
    """The loaded state belongs to no save, or to several."""


def new_state(value: float, *, sharded: bool = True) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in itertools.pairwise(_SIZES)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_pattern(value, number, parameter.shape))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return {"model": model, "extra_state": {"value": value, "table": _pattern(value, 99, torch.Size([_TABLE]))}}


def empty_state(*, sharded: bool = True) -> dict[str, Any]:
    return new_state(-1.0, sharded=sharded)


def value_of(state: dict[str, Any]) -> float:
    """Return the value of the one save to which this rank's part of ``state`` belongs, or raise ``WrongLoad``."""
    value = float(state["extra_state"]["value"])
    expected = new_state(value, sharded=False)
    if not torch.equal(state["extra_state"]["table"], expected["extra_state"]["table"]):
        raise WrongLoad(f"the table does not belong to save {value}")
    for name, parameter in state["model"].named_parameters():
        if not torch.equal(*_local(parameter, expected["model"].get_parameter(name))):
            raise WrongLoad(f"{name} does not belong to save {value}")
    return value


def stored_value(path: Path) -> float | None:
    """Return the value of the save that is committed at ``path``, None if there is none, or raise ``WrongLoad``."""
    try:
        checkpoint = bcp.open(path)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    report = checkpoint.verify()
    if not report.ok:
        raise WrongLoad(f"{path}: {report}")
    state = empty_state(sharded=False)
    bcp.load(path, state)
    return value_of(state)


def _local(parameter: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of both tensors without communication: other ranks may be dead."""
    if not isinstance(parameter, DTensor):
        return parameter, full
    rows = torch.chunk(full, parameter.device_mesh.size())
    rank = parameter.device_mesh.get_local_rank()
    return parameter.to_local(), rows[rank] if rank < len(rows) else full[:0]


def _pattern(value: float, number: int, shape: torch.Size) -> torch.Tensor:
    """Return integers that float32 represents exactly."""
    return torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + 1000 * number + 200_000 * value
