"""Compare the first saves of a process: how long does training stall, and until when is memory faulted in?

    python -m benchmarks.first_save [--scale 1] [--rounds 5] [--json benchmarks/results/first_save.json]

Every sample is taken in a new process, and the kinds of processes take turns. The state is GPT-2 with Adam. Each
process saves twice, with training after each save: synchronously, asynchronously, or asynchronously after ``warmup``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import results
from benchmarks.measure import Meter, Sample, TrainingStep
from benchmarks.peers.library import Library
from benchmarks.tables import Grid, show
from benchmarks.workloads import State, make

__all__ = ["main", "measure", "table"]

KINDS = ("synchronous", "asynchronous", "asynchronous after warmup")
_PAUSE_S = 5.0


def _sample(kind: str, workload: str, scale: float, pause_s: float, work: str) -> dict[str, Any]:
    """Save twice in this process, which has not saved before."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    state = State(make(workload, scale))
    state.fill()
    contestant = Library(background=kind != "synchronous")
    meter, step = Meter(contestant), TrainingStep()
    sample: dict[str, Any] = {}
    if kind.endswith("warmup"):
        begin = time.perf_counter()
        contestant.warm_up(state)
        sample["warmup_s"] = time.perf_counter() - begin
    for name in ("first", "second"):
        path = os.path.join(work, name)
        sample[name] = meter.save(path, state)
        shutil.rmtree(path)
        end = time.perf_counter() + pause_s
        while time.perf_counter() < end:
            step()
    meter.close()
    contestant.close()
    return sample


def measure(
    scale: float,
    rounds: int,
    folder: Path,
    *,
    workload: str = "gpt2-adam",
    pause_s: float = _PAUSE_S,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return samples by kind of process, one for each round; nothing is dropped, because each process is new."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bytecheckpoint.testing._preload"])
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="first-save-", dir=folder) as work:
        for turn in range(rounds):
            for kind in KINDS:
                say(f"first save: round {turn + 1} of {rounds}, {kind}")
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    found[kind].append(process.submit(_sample, kind, workload, scale, pause_s, work).result())
    made = make(workload, scale)
    return {"title": made.title, "bytes": made.nbytes, "kinds": found}


def table(result: dict[str, Any]) -> Grid:
    """Show median stalls, also as multiples of the first synchronous save of the same round, and their range."""
    columns = ("", "warmup, s", "first stall, s", "x synchronous", "least to most", "second stall, s", "memory / state")
    rows: list[tuple[str, ...]] = []
    base = [sample["first"]["stall_s"] for sample in result["kinds"][KINDS[0]]]
    for kind, samples in result["kinds"].items():
        warmups = [sample["warmup_s"] for sample in samples if "warmup_s" in sample]
        ratios = [sample["first"]["stall_s"] / synchronous for sample, synchronous in zip(samples, base)]
        rows.append(
            (
                kind,
                f"{statistics.median(warmups):.3f}" if warmups else "-",
                f"{_median(samples, 'first', 'stall_s'):.3f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{_median(samples, 'second', 'stall_s'):.3f}",
                f"{_median(samples, 'second', 'peak_bytes') / result['bytes']:.2f}",
            )
        )
    return Grid(f"{result['title']}, {result['bytes'] / 1e9:.2f} GB", columns, rows)


def _median(samples: list[dict[str, Sample]], which: str, key: str) -> float:
    return statistics.median(float(sample[which][key]) for sample in samples)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--pause", type=float, default=_PAUSE_S, help="seconds of training after each save")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"scale": options.scale, "rounds": options.rounds, "threads": 1, "pause_s": options.pause}
    command = f"python -m benchmarks.first_save --scale {options.scale:g} --rounds {options.rounds}"
    command += "" if options.pause == _PAUSE_S else f" --pause {options.pause:g}"
    document = results.header(command, settings, options.folder)
    document["result"] = measure(options.scale, options.rounds, options.folder, pause_s=options.pause)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, [options.folder]), indent=1) + "\n")


if __name__ == "__main__":
    main()
