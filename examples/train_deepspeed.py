"""Train the small GPT with DeepSpeed, and resume at another ZeRO stage and number of processes.

    export DS_ACCELERATOR=cpu      # without GPUs
    torchrun --nproc-per-node 2 examples/train_deepspeed.py --stage 2 --root runs/deepspeed --stop-at 20
    torchrun --nproc-per-node 3 examples/train_deepspeed.py --stage 3 --root runs/deepspeed --offload

The global batch depends only on the step, so the loss curve is the same in every layout, up to the precision of
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Config, Corpus

import bytecheckpoint as bcp


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--root", default="runs/deepspeed", help="where checkpoints go, a folder or a URL")
    parser.add_argument("--journal", type=Path, help="append the losses to this file")
    parser.add_argument("--stop-at", type=int, default=40, help="stop after this step")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=12, help="sequences in the global batch")
    parser.add_argument("--kill-at-step", type=int, help="kill rank 0 after this step, for the tests")
    return parser.parse_args()


def make_engine(args: argparse.Namespace) -> Any:
    torch.manual_seed(1)
    model = GPT(Config(n_layer=2, d_model=64, context=64))
    zero: dict[str, Any] = {"stage": args.stage}
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 20}
    config = {
        "train_batch_size": args.batch,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": warm_up},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(args: argparse.Namespace) -> None:
    engine, corpus = make_engine(args), Corpus()
    rank, world = dist.get_rank(), dist.get_world_size()
    # Everything that determines the next step. The engine's counters are part of "model".
    state = {"model": engine, "optimizer": engine.optimizer, "lr_scheduler": engine.lr_scheduler}
    with bcp.CheckpointManager(args.root, cadence=args.save_every) as manager:
        manager.resume(state)
        while engine.global_steps < args.stop_at:
            step = engine.global_steps
            tokens, following = (part.chunk(world)[rank] for part in corpus.batch(step, args.batch, 64, 1))
            logits = engine(tokens.to(engine.device))
            loss = F.cross_entropy(logits.float().flatten(0, 1), following.flatten().to(engine.device))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().double()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"[ZeRO-{args.stage} x{world}] step {engine.global_steps}  loss {mean / world:.4f}", flush=True)
                if args.journal:
                    with args.journal.open("a") as journal:
                        journal.write(json.dumps({"step": engine.global_steps, "loss": float(mean / world)}) + "\n")
            if rank == 0 and engine.global_steps == args.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.save(engine.global_steps, state)


def main() -> None:
    args = arguments()
    deepspeed.init_distributed("gloo" if deepspeed.get_accelerator().device_name() == "cpu" else "nccl")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
