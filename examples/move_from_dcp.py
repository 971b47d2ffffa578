"""A run that saves with torch.distributed.checkpoint moves over to this library, one line at a time.

    torchrun --nproc-per-node 2 examples/move_from_dcp.py --stage torch      # steps 1 to 4, as before
    torchrun --nproc-per-node 2 examples/move_from_dcp.py --stage switch     # to 8: another storage class
    torchrun --nproc-per-node 3 examples/move_from_dcp.py --stage library    # to 12: bcp.load and bcp.save

Each stage begins with a new model and continues where the one before has stopped. The last one runs on another number
of processes. The batch depends only on the step, so the losses are those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp

STEPS = {"torch": (0, 4), "switch": (4, 8), "library": (8, 12)}
WIDTH, BATCH = 24, 12


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's part of the step's batch. Returns the mean loss of all ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(BATCH, WIDTH, generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
    loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "extra": extra}


def run_stage(stage: str, root: Path) -> None:
    model, optimizer = build()
    extra: dict[str, Any] = {"step": 0}
    first, last = STEPS[stage]

    if stage == "switch":
        # The checkpoint that torch's classes wrote, for the last time.
        state = dcp_state(model, optimizer, extra)
        dcp.load(state, storage_reader=dcp.FileSystemReader(root / f"step-{first}"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if stage == "library":
        bcp.load(root / f"step-{first}", {"model": model, "optimizer": optimizer, "extra": extra})
    assert extra["step"] == first, extra

    for step in range(first + 1, last + 1):
        loss = train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)

    extra["step"] = last
    path = root / f"step-{last}"
    if stage == "torch":
        dcp.save(dcp_state(model, optimizer, extra), storage_writer=dcp.FileSystemWriter(path))
    if stage == "switch":
        dcp.save(dcp_state(model, optimizer, extra), storage_writer=bcp.dcp.Writer(path, step=last))
    if stage == "library":
        bcp.save(path, {"model": model, "optimizer": optimizer, "extra": extra}, step=last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/dcp"))
    parser.add_argument("--stage", choices=STEPS, nargs="+", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for stage in args.stage:
        run_stage(stage, args.root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
