"""Train a small GPT on any layout, save checkpoints on the way, and resume on any other layout.

    torchrun --nproc-per-node 4 examples/train_gpt.py --parallel fsdp2 --root runs/gpt
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel tp    --root runs/gpt     # resumes where that stopped
    python examples/train_gpt.py                      --parallel none  --root runs/gpt

After SIGTERM to torchrun or to any process, all ranks save the current step and exit.

The global batch depends only on the step, so the loss curve is the same in every layout, up to the order of
floating-point additions.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import time
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare_dcp import compare
from gpt import GPT, Config, Corpus, parallelize
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bytecheckpoint as bcp
from bytecheckpoint import telemetry


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp2", "tp"], default="none")
    parser.add_argument("--root", default="runs/gpt", help="where checkpoints go, a folder or a URL (step-10, ...)")
    parser.add_argument("--journal", type=Path, help="append one JSON line per step and per save to this file")
    parser.add_argument(
        "--steps", type=int, default=200, help="length of the entire run; the learning rate depends on it"
    )
    parser.add_argument("--stop-at", type=int, help="stop after this step instead")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep-last", type=int, help="number of checkpoints to keep (default: all)")
    parser.add_argument("--no-save", action="store_true", help="train only: neither save nor resume")
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--compare-at",
        type=int,
        metavar="STEP",
        help="after this step, compare the times of saves and loads with DCP, for the journal",
    )
    kill = parser.add_argument_group("fault injection, for the demo and the tests")
    kill.add_argument("--kill-rank", type=int, default=os.environ.get("TRAIN_GPT_KILL_RANK"))
    kill.add_argument("--kill-at-step", type=int, default=os.environ.get("TRAIN_GPT_KILL_AT_STEP"))
    kill.add_argument("--kill-phase", default=os.environ.get("TRAIN_GPT_KILL_PHASE", "write"))
    return parser.parse_args()


class Job:
    """Model, optimizer, schedule and data of one process, and the state that a checkpoint stores."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
        self.args = args
        self.rank, self.world = (mesh.get_rank(), mesh.size()) if mesh else (0, 1)
        self.config = Config()
        self.corpus = Corpus()
        torch.manual_seed(args.seed)
        self.model = parallelize(GPT(self.config).to(args.device), args.parallel, mesh)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=args.lr, betas=(0.9, 0.95), foreach=args.parallel != "tp")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._warm_up_then_cosine)
        self.extra = {"step": 0, "corpus": self.corpus.fingerprint}

    def _groups(self) -> list[dict[str, Any]]:
        parameters = list(self.model.parameters())
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    def _warm_up_then_cosine(self, step: int) -> float:
        # Without the warm-up the first steps amplify rounding: curves that should agree to 1e-6 differ by 1e-4.
        warm_up = min(10, self.args.steps // 4)
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        done = (step - warm_up) / max(1, self.args.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "rng": bcp.RNGState(),
            "extra_state": self.extra,
        }

    def _my_part(self, batch: torch.Tensor) -> torch.Tensor:
        if self.args.parallel != "tp":  # with tensor parallelism all ranks process the full batch together
            batch = batch.chunk(self.world)[self.rank]
        return batch.to(self.args.device)

    def _loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, following = (self._my_part(part) for part in batch)
        return F.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten())

    def _global_mean(self, loss: torch.Tensor) -> float:
        mean = loss.detach().to(torch.float64, copy=True)
        if self.world > 1:
            dist.all_reduce(mean)
            mean /= self.world
        return float(mean)

    def train_step(self) -> float:
        """Make one step, and return the global mean loss before it."""
        step = self.extra["step"]
        loss = self._loss(self.corpus.batch(step, self.args.batch, self.config.context, self.args.seed))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.extra["step"] = step + 1
        return self._global_mean(loss)

    @torch.no_grad()
    def validate(self) -> float:
        return self._global_mean(self._loss(self.corpus.validation(64, self.config.context)))


class Journal:
    """Writes one JSON object per line, on rank 0 only; ``write`` flushes each line."""

    def __init__(self, path: Path | None, enabled: bool, layout: str) -> None:
        self.layout = layout
        self.enabled = enabled
        self.file = None
        if enabled and path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", buffering=1)

    def write(self, event: str, **facts: Any) -> None:
        if not self.enabled:
            return
        if self.file:
            self.file.write(json.dumps({"event": event, "layout": self.layout, **facts}) + "\n")
        shown = "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
        print(f"[{self.layout}] {event:6} {shown}", flush=True)

    def close(self) -> None:
        if self.file:
            self.file.close()


def managed(args: argparse.Namespace) -> AbstractContextManager[bcp.CheckpointManager | None]:
    if args.no_save:
        return nullcontext()
    # Steps of this model take a tenth of a second: coordinate often enough to exit within a few steps.
    return bcp.CheckpointManager(
        args.root, cadence=args.save_every, keep=args.keep_last, job=bcp.JobOptions(coordinate_every_s=0.25)
    )


def resume(job: Job, manager: bcp.CheckpointManager, journal: Journal) -> None:
    """Fill the job from the newest valid checkpoint below the root, if there is one."""
    start = time.perf_counter()
    if manager.resume(job.state) is None:
        return
    journal.write("resume", step=job.extra["step"], load_s=time.perf_counter() - start)
    if job.extra["corpus"] != job.corpus.fingerprint:
        raise SystemExit(
            "this checkpoint was trained on another Python version's standard library, so its loss curve cannot be "
            "continued here; use that Python, or another --root"
        )


def train(args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
    job = Job(args, mesh)
    with (
        closing(Journal(args.journal, job.rank == 0, f"{args.parallel} x{job.world}")) as journal,
        managed(args) as manager,
    ):
        journal.write("start", parameters=sum(p.numel() for p in job.model.parameters()))
        if manager:
            resume(job, manager, journal)
            telemetry.observe(partial(kill_here, job))
        while job.extra["step"] < (args.stop_at or args.steps):
            start = time.perf_counter()
            loss = job.train_step()
            step = job.extra["step"]
            journal.write("step", step=step, loss=loss, seconds=time.perf_counter() - start)
            if manager:
                start = time.perf_counter()
                # After SIGTERM to any process, all save this step and exit inside this call.
                if manager.save(step, job.state):
                    journal.write("save", step=step, stall_s=time.perf_counter() - start)
                if step == args.compare_at and args.journal:
                    manager.wait()
                    journal.write("times", **compare(job.model, job.optimizer, args.journal.with_name("compare")))
        journal.write("valid", step=job.extra["step"], loss=job.validate())


def kill_here(job: Job, phase: str, event: str) -> None:
    """Kill this process at the given point of a save."""
    args, step = job.args, job.extra["step"]
    saving = step - step % args.save_every  # training may have continued
    here = (job.rank, saving, phase) == (args.kill_rank, args.kill_at_step, f"save.{args.kill_phase}")
    if here and event in ("enter", "point"):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and args.parallel == "none":
        return train(args, None)
    if args.parallel == "none":
        raise SystemExit("--parallel none is for one process; use ddp, fsdp2 or tp")
    if args.parallel != "tp" and args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not divide evenly among {world} processes")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))
    try:
        train(args, init_device_mesh(args.device, (world,)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
        # gloo's threads release a collective's tensors shortly after it has returned, and abort the process if the
        # interpreter has ended by then. Dropping the last reference to the group joins them, so drop it now.
        gc.collect()


if __name__ == "__main__":
    main()
