"""Compare in-place loads of other systems' checkpoints with those systems' own loads: bytes read, and seconds.

    python -m benchmarks.foreign_loads [--scale 1] [--rounds 5] [--json benchmarks/results/foreign_loads.json]

Two ranks train a model with Adam and save it with the other system. Then this library and that system load it, in turns
in every round, into new objects. Bytes are those that all ranks read from files (``rchar`` of Linux), relative to the
bytes that their shards need; seconds are those of the slowest rank, with the files in the page cache. DeepSpeed takes
part if it is installed (``make test-deepspeed`` makes such an environment). Measured is the second load of a process,
which imports nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import bytecheckpoint as bcp
from benchmarks import results
from benchmarks.tables import Grid, show
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["CASES", "Case", "main", "measure", "table"]

_LAYERS, _WIDTH = 8, 2048
_RANKS_OF_SAVE = 2
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A load of what two ranks saved. ``stage`` is that of DeepSpeed's ZeRO; None means DCP."""

    title: str
    ranks: int
    stage: int | None = None
    only_model: bool = False


CASES = (
    Case("DCP, FSDP-2 on 2 ranks to 2", 2),
    Case("DCP, FSDP-2 on 2 ranks to 4", 4),
    Case("DCP, FSDP-2 on 2 ranks to 4, only the model", 4, only_model=True),
    Case("DeepSpeed, ZeRO-2 on 2 ranks", 2, stage=2),
    Case("DeepSpeed, ZeRO-3 on 2 ranks", 2, stage=3),
)


def _model(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))


class _Fsdp:
    """FSDP-2 with Adam, and DCP."""

    def __init__(self, case: Case, width: int, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard

        self._case = case
        self.model = _model(width, seed)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if not self._case.only_model:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def save(self, path: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save({**self._state()}, checkpoint_id=path)

    def load_with_theirs(self, path: str) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        if not self._case.only_model:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def load(self, path: str) -> int:
        state: dict[str, Any] = {"model": self.model}
        if not self._case.only_model:
            state["optimizer"] = self.optimizer
        return bcp.load(path, state).bytes_requested


class _DeepSpeed:
    """An engine of DeepSpeed in bf16."""

    def __init__(self, case: Case, width: int, seed: int) -> None:
        os.environ.update({"DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"})
        import deepspeed

        # Building its extension for communication between CPUs takes minutes.
        deepspeed.comm.torch.build_shm_op = lambda: None
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": case.stage, "memory_efficient_linear": False},
            "zero_force_ds_cpu_optimizer": False,
        }
        self.width = width
        model = _model(width, seed)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.Adam(model.parameters()), config=config, dist_init_required=False
        )

    def train(self) -> None:
        self.engine.backward(self.engine(torch.randn(1, self.width, dtype=torch.bfloat16)).float().square().mean())
        self.engine.step()

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(path)

    def load_with_theirs(self, path: str) -> None:
        self.engine.load_checkpoint(path)

    def load(self, path: str) -> int:
        return bcp.load(path, {"model": self.engine, "optimizer": self.engine.optimizer}).bytes_requested


def _job(case: Case, width: int, seed: int) -> _Fsdp | _DeepSpeed:
    warnings.simplefilter("ignore")
    return _Fsdp(case, width, seed) if case.stage is None else _DeepSpeed(case, width, seed)


def _save(rank: int, world_size: int, case: Case, width: int, path: str) -> None:
    with redirect_stdout(StringIO()):
        job = _job(case, width, seed=1)
        job.train()
        job.save(path)


def _load(rank: int, world_size: int, case: Case, width: int, path: str, by: str) -> dict[str, float]:
    """The second load into a new job: seconds, bytes read, and for this library the bytes requested."""
    with redirect_stdout(StringIO()):
        job = _job(case, width, seed=2)
        load = job.load if by == "bytecheckpoint" else job.load_with_theirs
        load(path)  # the first load of a process imports modules
        dist.barrier()
        before, begin = _bytes_read(), time.perf_counter()
        requested = load(path)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "read": _bytes_read() - before, "requested": requested or 0}


def _bytes_read() -> int:
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def _run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run it in new processes, because DeepSpeed keeps process groups that have been destroyed."""
    with RankPool(ranks) as pool:
        return pool.run(function, *arguments, timeout_s=_TIMEOUT_S)


def measure(scale: float, rounds: int, folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Return samples by case and contestant, one for each round after a warm-up round."""
    width = max(int(_WIDTH * scale**0.5) // 8 * 8, 8)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    cases = [case for case in CASES if case.stage is None or find_spec("deepspeed")]
    with tempfile.TemporaryDirectory(prefix="foreign-loads-", dir=folder) as work:
        for number, case in enumerate(cases):
            path = f"{work}/{number}"
            _run(_RANKS_OF_SAVE, _save, case, width, path)
            theirs = "DCP" if case.stage is None else "DeepSpeed"
            samples = found[case.title] = {"bytecheckpoint": [], theirs: []}
            for turn in range(rounds + 1):
                say(f"{case.title}: round {turn} of {rounds}")
                for by, kept in samples.items():
                    ranks = _run(case.ranks, _load, case, width, path, by)
                    sample = {key: sum(rank[key] for rank in ranks) for key in ("read", "requested")}
                    if turn:
                        kept.append({"seconds": max(rank["seconds"] for rank in ranks), **sample})
    return {"parameters": _LAYERS * (width * width + width), "cases": found}


def table(result: dict[str, Any]) -> Grid:
    """Show medians: bytes read relative to the requested ones, and seconds, of this library and the other system."""
    columns = ("", "requested, MB", "read", "read by the other", "s", "s of the other", "x faster, least to most")
    rows: list[tuple[str, ...]] = []
    for title, samples in result["cases"].items():
        own, other = samples.values()
        requested = statistics.median(sample["requested"] for sample in own)
        reads = [statistics.median(sample["read"] for sample in part) / requested for part in (own, other)]
        seconds = [statistics.median(sample["seconds"] for sample in part) for part in (own, other)]
        ratios = sorted(theirs["seconds"] / ours["seconds"] for ours, theirs in zip(own, other))
        rows.append(
            (
                title,
                f"{requested / 1e6:.0f}",
                *(f"{read:.2f}" for read in reads),
                *(f"{value:.2f}" for value in seconds),
                f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})",
            )
        )
    return Grid(f"Loads of other systems' checkpoints, {result['parameters'] / 1e6:.1f} M parameters", columns, rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"scale": options.scale, "rounds": options.rounds, "threads": 1}
    command = f"python -m benchmarks.foreign_loads --scale {options.scale:g} --rounds {options.rounds}"
    document = results.header(command, settings, options.folder)
    document["result"] = measure(options.scale, options.rounds, options.folder)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, [options.folder]), indent=1) + "\n")


if __name__ == "__main__":
    main()
