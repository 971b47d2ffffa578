"""Save at full speed for a long time: do memory, descriptors, files and latencies stay as they are?

    mount -t tmpfs -o size=48m none /mnt/small   # a small file system, so that the disk is nearly full
    python -m benchmarks.long_run --folder /mnt/small --minutes 30 [--json benchmarks/results/long_run.json]

Two ranks train an FSDP-2 model, of which one layer after another stops changing, and save every step: asynchronous,
incremental saves, of which the newest three are kept. Meanwhile a third process, with a plain model, loads the newest
checkpoint again and again, which reshards it, and checks that it is complete and from one step.
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
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import bytecheckpoint as bcp
from benchmarks import results
from benchmarks.tables import Grid, show
from bytecheckpoint import errors

__all__ = ["main", "measure", "series", "table"]

_RANKS = 2
_LAYERS, _WIDTH = 8, 256
_SAMPLES = 120  # of a run


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _own() -> dict[str, int]:
    """Resident memory, open descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _note_end(durable: list[float], begin: float, handle: object) -> None:
    durable.append(time.perf_counter() - begin)


def _train(rank: int, folder: str, root: str, seconds: float, sink: Connection) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=_RANKS)
    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mark = torch.zeros(1024)
    extra: dict[str, Any] = {"step": 0, "mark": mark}
    state = {"model": model, "optimizer": optimizer, "extra": extra}
    stalls: list[float] = []
    durable: list[float] = []
    end, next_sample = time.monotonic() + seconds, 0.0
    options = bcp.SaveOptions(base="auto")
    with bcp.CheckpointManager(root, cadence=1, keep=3, save=options, preemption=None) as manager:
        step, going = 0, torch.ones(1)
        while going.item():
            step += 1
            for number, layer in enumerate(model):
                layer.requires_grad_((step // 50 + number) % _LAYERS > 1)  # two layers rest, in turn
            model(torch.randn(8, _WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            extra["step"] = step
            mark.fill_(step)
            begin = time.perf_counter()
            handle = manager.save(step, state)
            stalls.append(time.perf_counter() - begin)
            if handle is not None:
                handle.add_done_callback(partial(_note_end, durable, begin))
            going = torch.tensor([float(time.monotonic() < end)])
            dist.broadcast(going, 0)
            if time.monotonic() >= next_sample:
                sink.send({"rank": rank, "step": step, "stall_s": stalls, "durable_s": [*durable], **_own()})
                stalls, next_sample = [], time.monotonic() + seconds / _SAMPLES
                durable.clear()
    sink.send({"rank": rank, "step": step, "stall_s": stalls, "durable_s": [*durable], **_own()})
    dist.destroy_process_group()


def _evaluate(root: str, seconds: float, sink: Connection) -> None:
    """Load the newest checkpoint into a plain model until the time is over."""
    torch.set_num_threads(1)
    model = _model()
    mark = torch.zeros(1024)
    extra: dict[str, Any] = {"step": 0, "mark": mark}
    loads: list[float] = []
    removed = 0
    end, next_sample = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        begin = time.perf_counter()
        newest = bcp.latest(root, allow_fresh=True)
        if newest is None:
            continue
        try:
            bcp.load(newest, {"model": model, "extra": extra})
        except (errors.CheckpointError, errors.StorageError):
            if newest == bcp.latest(root):
                raise
            removed += 1  # retention removed it during the load; a newer one exists
            continue
        loads.append(time.perf_counter() - begin)
        if not bool(torch.all(mark == extra["step"])):
            raise AssertionError(f"{newest} mixes steps")
        if time.monotonic() >= next_sample:
            sink.send({"rank": _RANKS, "load_s": loads, "removed": removed, **_own()})
            loads, removed, next_sample = [], 0, time.monotonic() + seconds / _SAMPLES
    sink.send({"rank": _RANKS, "load_s": loads, "removed": removed, **_own()})


def _disk(root: Path) -> dict[str, int]:
    files = [os.path.join(path, name) for path, _, names in os.walk(root) for name in names]
    used = 0
    for name in files:
        try:
            used += os.stat(name).st_blocks * 512
        except OSError:
            continue  # removed since it was listed
    return {"files": len(files), "used_bytes": used, "free_bytes": shutil.disk_usage(root).free}


def measure(folder: Path, minutes: float) -> dict[str, Any]:
    """Return the samples of all processes, each with the second at which it arrived, and those of the disk."""
    context = multiprocessing.get_context("spawn")
    seconds = minutes * 60
    samples: list[dict[str, Any]] = []
    disk: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="long-run-") as shared, tempfile.TemporaryDirectory(dir=folder) as root:
        pipes = [context.Pipe(duplex=False) for _ in range(_RANKS + 1)]
        jobs = [
            context.Process(target=_train, args=(rank, shared, root, seconds, pipes[rank][1])) for rank in range(_RANKS)
        ]
        jobs.append(context.Process(target=_evaluate, args=(root, seconds, pipes[_RANKS][1])))
        begin = time.monotonic()
        for job in jobs:
            job.start()
        while running := [job.sentinel for job in jobs if job.is_alive()]:
            wait(running, seconds / _SAMPLES)
            for source, _ in pipes:
                while source.poll():
                    samples.append({"at_s": time.monotonic() - begin, **_summarized(source.recv())})
            disk.append({"at_s": time.monotonic() - begin, **_disk(Path(root))})
            if any(job.exitcode for job in jobs):
                for job in jobs:
                    job.kill()
                raise RuntimeError("a process of the run failed; its traceback is above")
    return {"minutes": minutes, "samples": samples, "disk": disk}


def _summarized(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace the latencies of a sample by their number, median, 99th percentile and maximum."""
    found = dict(sample)
    for key in ("stall_s", "durable_s", "load_s"):
        ordered = sorted(found.pop(key, ()))
        if ordered:
            found[key] = [len(ordered), statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[-1]]
    return found


def table(result: dict[str, Any]) -> Grid:
    """Compare the quarters of the run by the medians of their samples. The first one includes the start."""

    def quarters(chosen: Sequence[dict[str, Any]], key: str) -> list[list[Any]]:
        values = [sample[key] for sample in chosen if key in sample]
        return [values[len(values) * part // 4 : len(values) * (part + 1) // 4] for part in range(4)]

    def of(rank: int) -> list[dict[str, Any]]:
        return [sample for sample in result["samples"] if sample["rank"] == rank]

    def latency(title: str, rank: int, key: str) -> tuple[str, ...]:
        cells = []
        for quarter in quarters(of(rank), key):
            if not quarter:
                cells.append("-")
                continue
            _, p50, p99, worst = zip(*quarter, strict=True)
            cells.append(" / ".join(f"{1e3 * one:.1f}" for one in (*map(statistics.median, (p50, p99)), max(worst))))
        return (title, *cells)

    def level(title: str, chosen: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> tuple[str, ...]:
        parts = quarters(chosen, key)
        return (title, *(f"{statistics.median(part) * scale:.1f}" if part else "-" for part in parts))

    names = {0: "rank 0", 1: "rank 1", _RANKS: "the reader"}
    rows = [
        latency("stall of a save, ms: p50 / p99 / worst", 0, "stall_s"),
        latency("until durable, ms: p50 / p99 / worst", 0, "durable_s"),
        latency("load by the reader, ms: p50 / p99 / worst", _RANKS, "load_s"),
        *(level(f"memory of {name}, MB", of(rank), "memory_bytes", 1e-6) for rank, name in names.items()),
        *(level(f"descriptors of {name}", of(rank), "descriptors") for rank, name in names.items()),
        *(level(f"threads of {name}", of(rank), "threads") for rank, name in names.items()),
        level("files", result["disk"], "files"),
        level("used, MB", result["disk"], "used_bytes", 1e-6),
        level("free, MB", result["disk"], "free_bytes", 1e-6),
    ]
    steps = max(sample.get("step", 0) for sample in result["samples"])
    loads = sum(sample["load_s"][0] for sample in of(_RANKS) if "load_s" in sample)
    title = f"{steps:,} saves and {loads:,} loads in {result['minutes']:g} minutes"
    return Grid(title, ("medians of each quarter", "first", "second", "third", "last"), rows)


Line = tuple[list[float], list[float]]
"""Minutes and values."""


def series(result: dict[str, Any]) -> dict[str, dict[str, Line]]:
    """Return the lines to draw, by the title of a diagram and their own."""

    def line(rank: int, key: str, scale: float) -> Line:
        chosen = [sample for sample in result["samples"] if sample["rank"] == rank and key in sample]
        values = [one[1] if isinstance(one := sample[key], list) else one for sample in chosen]
        return [sample["at_s"] / 60 for sample in chosen], [value * scale for value in values]

    minutes = [one["at_s"] / 60 for one in result["disk"]]
    return {
        "Latency, ms": {
            "until durable": line(0, "durable_s", 1e3),
            "stall": line(0, "stall_s", 1e3),
            "load": line(_RANKS, "load_s", 1e3),
        },
        "Memory, MB": {
            "rank 0": line(0, "memory_bytes", 1e-6),
            "rank 1": line(1, "memory_bytes", 1e-6),
            "reader": line(_RANKS, "memory_bytes", 1e-6),
        },
        "Disk": {
            "used, MB": (minutes, [one["used_bytes"] / 1e6 for one in result["disk"]]),
            "files": (minutes, [float(one["files"]) for one in result["disk"]]),
        },
    }


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--remark", default="", help="a sentence on the circumstances, for the report")
    options = parser.parse_args()
    command = f"python -m benchmarks.long_run --minutes {options.minutes:g}"
    document = results.header(
        command, {"minutes": options.minutes, "threads": 1, "remark": options.remark}, options.folder
    )
    document["result"] = measure(options.folder, options.minutes)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, [options.folder]), indent=1) + "\n")


if __name__ == "__main__":
    main()
