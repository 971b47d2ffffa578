"""Save and load the same model and optimizer with this library and with ``torch.distributed.checkpoint``.

Both write durably. The times are those that a training script waits, from its objects and back into them. Repeats are
interleaved, the first of each is discarded, and every number is that of the slowest rank.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bytecheckpoint as bcp

__all__ = ["compare"]

Times = dict[str, list[float]]


def compare(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, repeats: int = 5) -> dict[str, float]:
    """Median seconds by name: ``<system>_stall_s``, ``<system>_durable_s`` and ``<system>_load_s``."""
    times: Times = {}
    for turn in range(repeats + 1):
        found: Times = {}
        for name, run in (("bytecheckpoint", _bytecheckpoint), ("dcp", _dcp)):
            path = folder / f"{name}-{turn}"
            gc.collect()
            _run(run, name, path, model, optimizer, found)
            _barrier()
            if _rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
        if turn:
            for name, values in found.items():
                times.setdefault(name, []).extend(values)
    return {name: _slowest_rank(median(values)) for name, values in times.items()}


def _run(
    run: Callable[..., dict[str, float]],
    name: str,
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: Times,
) -> None:
    _barrier()
    for stage, seconds in run(path, model, optimizer).items():
        found[f"{name}_{stage}_s"] = [seconds]


def _bytecheckpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    state = {"model": model, "optimizer": optimizer}
    start = time.perf_counter()
    handle = bcp.save(str(path), state, async_save=True)
    stalled = time.perf_counter()
    handle.result()
    durable = time.perf_counter()
    _barrier()
    again = time.perf_counter()
    bcp.load(str(path), state)
    return {"stall": stalled - start, "durable": durable - start, "load": time.perf_counter() - again}


def _dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    start = time.perf_counter()
    future: Any = dcp.async_save(_dcp_state(model, optimizer), checkpoint_id=str(path))
    stalled = time.perf_counter()
    future.result()
    durable = time.perf_counter()
    _barrier()
    again = time.perf_counter()
    state = _dcp_state(model, optimizer)
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"stall": stalled - start, "durable": durable - start, "load": time.perf_counter() - again}


def _dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _slowest_rank(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
