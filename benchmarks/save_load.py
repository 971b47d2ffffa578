"""Measure saves and loads in one process: the floors and all contestants take turns (A B C A B C)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.environments import Environments
from benchmarks.peers import Entry
from benchmarks.processes import Worker
from benchmarks.worker import Job

__all__ = ["measure"]

Say = Callable[[str], None]


def measure(
    workload_name: str,
    entries: Sequence[Entry],
    *,
    scale: float,
    rounds: int,
    threads: int,
    folder: Path,
    environments: Environments,
    say: Say,
) -> dict[str, Any]:
    """Return all samples of one workload, without the first round, which warms up arenas, pools and guest memory.

    ``{"bytes", "tensors", "title", "floors": [...], "contestants": {name: {"versions", "failure", "samples"}}}``,
    samples by round. A contestant that cannot run, fails or restores a wrong byte is excluded, with the reason.
    """
    workload = workloads.make(workload_name, scale)
    floors: list[dict[str, Any]] = []
    samples: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in entries}
    with tempfile.TemporaryDirectory(prefix="save-load-", dir=folder) as work, ExitStack() as stack:
        jobs: list[tuple[str, Entry | None]] = [("floors", None), *((entry.name, entry) for entry in entries)]
        workers: list[Worker] = []
        for index, (name, entry) in enumerate(jobs):
            say(f"{workload_name}: starting {name}")
            job = Job(entry, workload_name, scale, str(Path(work) / str(index)), threads)
            worker = Worker(name, job, environments)
            stack.callback(worker.close)
            workers.append(worker)
        for turn in range(rounds + 1):
            for worker in workers:
                if worker.failure:
                    continue
                say(f"{workload_name}: {f'round {turn} of {rounds}' if turn else 'warming up'}, {worker.name}")
                result = worker.turn()
                if result is None or turn == 0:
                    continue
                (floors if worker is workers[0] else samples[worker.name]).append(result)
    if workers[0].failure:
        raise RuntimeError(f"the floors could not be measured: {workers[0].failure}")
    return {
        "title": workload.title,
        "bytes": workload.nbytes,
        "tensors": len(workload.tensors),
        "floors": floors,
        "contestants": {
            worker.name: {
                "versions": worker.versions,
                "note": entry.note,
                "failure": worker.failure or _wrong(samples[worker.name]),
                "samples": samples[worker.name],
            }
            for worker, entry in zip(workers[1:], entries)
        },
    }


def _wrong(samples: Sequence[dict[str, Any]]) -> str:
    """Return the fault of a load that restored wrong bytes, or None."""
    for sample in samples:
        for part in ("cold", "warm"):
            if (name := sample.get(part, {}).get("wrong")) is not None:
                return f"its {part} load brought back wrong bytes in {name}"
    return ""
