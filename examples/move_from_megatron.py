"""Move a run from Megatron-core's own checkpoints to this library, in place and in the middle of the run.

    torchrun --nproc-per-node 4 examples/move_from_megatron.py write --tp 2 --pp 2 --old runs/old
    torchrun --nproc-per-node 2 examples/move_from_megatron.py continue --tp 2 --pp 1 --old runs/old --new runs/new
    torchrun --nproc-per-node 2 examples/move_from_megatron.py continue --fsdp --old runs/old --new runs/new-fsdp

``write`` is the run so far: it saves with ``dist_checkpointing.save``, as Megatron's trainer does. ``continue`` loads
that folder into a model of other parallel sizes, trains on, and saves with this library; or it loads it into plain
modules of the same names under FSDP-2 with AdamW of torch. Without CUDA, it uses the CPU shim of this repository's
tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from train_megatron import build, on_any_device, train_step

import bytecheckpoint as bcp

STEPS = 4
POINTER = "latest_checkpointed_iteration.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "continue"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true", help="load without Megatron")
    parser.add_argument("--old", required=True, help="the folder that Megatron saves into")
    parser.add_argument("--new", help="where this library saves, a folder or a URL")
    return parser.parse_args()


def schedule(optimizer: Any) -> Any:
    """The scheduler of Megatron's trainer."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rates = {"init_lr": 0.0, "max_lr": 3e-3, "min_lr": 0.0, "lr_warmup_steps": 1, "lr_decay_steps": 20}
    decays = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 20, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(optimizer, lr_decay_style="cosine", **rates, **decays)


def train(model: Any, optimizer: Any, scheduler: Any, after: int) -> int:
    for step in range(after + 1, after + STEPS + 1):
        loss = train_step(model, optimizer, step)
        scheduler.step(increment=1)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}", flush=True)
    return after + STEPS


def write(args: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    model, optimizer = build(args.tp, args.pp)
    scheduler = schedule(optimizer)
    step = train(model, optimizer, scheduler, after=0)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": True}
    metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    shards = model.module.module.sharded_state_dict(metadata=metadata)
    state = {
        "model": shards,
        "optimizer": optimizer.sharded_state_dict({"model": shards}, metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "iteration": step,
    }
    folder = Path(args.old) / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    if dist.get_rank() == 0:
        (Path(args.old) / POINTER).write_text(str(step))


def continue_megatron(args: argparse.Namespace) -> None:
    model, optimizer = build(args.tp, args.pp)
    scheduler = schedule(optimizer)
    state = {"model": model, "optimizer": optimizer, "opt_param_scheduler": scheduler}
    report = bcp.load(args.old, state)  # in place of dist_checkpointing.load
    step = train(model, optimizer, scheduler, after=report.step or 0)
    bcp.save(f"{args.new}/step-{step}", state, step=step)


def continue_fsdp(args: argparse.Namespace) -> None:
    model = nn.Module()
    stored = bcp.open(args.old)
    for name in stored:
        section, _, fqn = name.partition(".")
        if section == "model":
            add_parameter(model, fqn, stored[name].shape)
    fully_shard(model)
    groups = [[param for param in model.parameters() if (param.ndim > 1) is decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    state = {"model": model, "optimizer": optimizer}
    # The weights are the float32 master weights, and the learning rates are the stored ones.
    report = bcp.load(args.old, state)
    bcp.save(f"{args.new}/step-{report.step}", state, step=report.step)


def add_parameter(model: nn.Module, fqn: str, shape: tuple[int, ...]) -> None:
    """Stands for the modules of your own implementation of the model."""
    *parents, leaf = fqn.split(".")
    module = model
    for part in parents:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, nn.Parameter(torch.empty(shape)))


def main() -> None:
    args = arguments()
    with on_any_device():
        if args.what == "write":
            write(args)
        elif args.fsdp:
            continue_fsdp(args)
        else:
            continue_megatron(args)


if __name__ == "__main__":  # Megatron's save starts processes, which import this script again
    main()
