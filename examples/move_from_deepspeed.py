"""Move a run from DeepSpeed's own checkpoints to this library, in place and in the middle of the run.

    export DS_ACCELERATOR=cpu      # without GPUs
    torchrun --nproc-per-node 2 examples/move_from_deepspeed.py write --stage 3 --old runs/old
    torchrun --nproc-per-node 3 examples/move_from_deepspeed.py continue --stage 1 --old runs/old --new runs/new
    torchrun --nproc-per-node 2 examples/move_from_deepspeed.py continue --fsdp --old runs/old --new runs/new-fsdp

``write`` is the run so far: it saves with ``engine.save_checkpoint``. ``continue`` loads that folder into an engine of
another stage and number of processes, or into FSDP-2 and AdamW of torch, trains on, and saves with this library.
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Config, Corpus
from torch.distributed.fsdp import fully_shard
from train_deepspeed import make_engine

import bytecheckpoint as bcp

BATCH, STEPS = 12, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "continue"])
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--fsdp", action="store_true", help="continue without DeepSpeed")
    parser.add_argument("--old", required=True, help="the folder of engine.save_checkpoint")
    parser.add_argument("--new", help="where this library saves, a folder or a URL")
    return parser.parse_args()


def loss_of(model: Any, corpus: Corpus, step: int) -> torch.Tensor:
    """The loss of this rank's part of the global batch, which depends only on the step."""
    device = next(model.parameters()).device
    parts = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in corpus.batch(step, BATCH, 64, 1))
    tokens, following = (part.to(device) for part in parts)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten())


def report(step: int, loss: torch.Tensor) -> None:
    mean = loss.detach().float()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)


def train_engine(engine: Any) -> None:
    corpus = Corpus()
    for _ in range(STEPS):
        loss = loss_of(engine, corpus, engine.global_steps)
        engine.backward(loss)
        engine.step()
        report(engine.global_steps, loss)


def write(args: argparse.Namespace) -> None:
    engine = make_engine(argparse.Namespace(stage=args.stage, offload=False, batch=BATCH))
    train_engine(engine)
    engine.save_checkpoint(args.old, client_state={"epoch": 1})


def continue_engine(args: argparse.Namespace) -> None:
    engine = make_engine(argparse.Namespace(stage=args.stage, offload=False, batch=BATCH))
    state = {"model": engine, "optimizer": engine.optimizer, "lr_scheduler": engine.lr_scheduler}
    bcp.load(args.old, state)  # in place of engine.load_checkpoint
    train_engine(engine)
    bcp.save(f"{args.new}/step-{engine.global_steps}", state, step=engine.global_steps)


def continue_fsdp(args: argparse.Namespace) -> None:
    model = GPT(Config(n_layer=2, d_model=64, context=64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    extra = {"global_steps": 0, "epoch": 0}
    state = {"model": model, "optimizer": optimizer, "extra_state": extra}
    # The weights are the float32 master weights, and the learning rate is the stored one.
    bcp.load(args.old, state, strict={"extra_state": False})
    corpus = Corpus()
    for _ in range(STEPS):
        loss = loss_of(model, corpus, extra["global_steps"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        extra["global_steps"] += 1
        report(extra["global_steps"], loss)
    bcp.save(f"{args.new}/step-{extra['global_steps']}", state, step=extra["global_steps"])


def main() -> None:
    args = arguments()
    deepspeed.init_distributed("gloo" if deepspeed.get_accelerator().device_name() == "cpu" else "nccl")
    try:
        if args.what == "write":
            write(args)
        elif args.fsdp:
            continue_fsdp(args)
        else:
            continue_engine(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
