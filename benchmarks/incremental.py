"""Compare incremental saves with a hash of the same bytes and with complete saves.

    python -m benchmarks.incremental [--gigabytes 1.5] [--rounds 5] [--json benchmarks/results/incremental.json]

Contestants take turns in every round: one thread that computes the checksums of a save, a complete save, an incremental
save of an unchanged state, one after 1 % of the chunks changed, and a LoRA step on a frozen base. The first of all
saves, which writes everything, is not counted. Every checkpoint is verified in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console

import bytecheckpoint as bcp
from benchmarks import results
from benchmarks.tables import Grid, show
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.engine.checksums import chunk_size_for

__all__ = ["measure", "table"]

_TENSOR_BYTES = 16 << 20
_ADAPTER_BYTES = 1 << 20
_CHANGED = 100  # every so many chunks one changes


def _state(nbytes: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{i}.weight": torch.randn(_TENSOR_BYTES // 4, generator=generator)
        for i in range(max(1, nbytes // _TENSOR_BYTES))
    }
    adapter = {f"adapter.{i}": torch.zeros(_ADAPTER_BYTES // 4) for i in range(3)}  # weights and two moments
    return {"model": weights, "adapter": adapter}


def _hash(state: dict[str, dict[str, torch.Tensor]]) -> None:
    step = chunk_size_for(0)
    for tensor in state["model"].values():
        data = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
        for at in range(0, len(data), step):
            xxhash.xxh3_128_intdigest(data[at : at + step])


def measure(nbytes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return the seconds of each round, and the bytes written, of every contestant."""
    state = _state(nbytes)
    total = sum(tensor.nbytes for section in state.values() for tensor in section.values())
    step = chunk_size_for(0) // 4
    samples: dict[str, dict[str, Any]] = {}

    def change() -> None:
        for number, tensor in enumerate(state["model"].values()):
            for at in range(number % _CHANGED * step, len(tensor), _CHANGED * step):
                tensor[at] += 1

    def train() -> None:
        for tensor in state["adapter"].values():
            tensor.add_(1)

    with bcp.Checkpointer() as checkpointer:

        def save(base: str | None, *, use_async: bool = False) -> int:
            number = sum(1 for _ in folder.glob("step-*"))
            path = folder / f"step-{number}"
            handle = checkpointer.save(
                path, state, step=number, async_save=use_async, options=bcp.SaveOptions(base=base)
            )
            return handle.result().bytes_written

        save("auto")
        contestants: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
            "hash, one thread": (lambda: None, lambda: _hash(state)),
            "complete save": (lambda: None, lambda: save(None)),
            "unchanged": (lambda: None, lambda: save("auto")),
            "unchanged, asynchronous": (lambda: None, lambda: save("auto", use_async=True)),
            "1 % of the chunks changed": (change, lambda: save("auto")),
            "LoRA step": (train, lambda: save("auto")),
        }
        for _ in range(rounds):
            for name, (prepare, run) in contestants.items():
                prepare()
                os.sync()  # the disk may still be at work on the contestant before
                _hash(state)  # the first pass over the state is slower than later ones, after a complete save
                begun = time.perf_counter()
                written = run()
                seconds = time.perf_counter() - begun
                one = samples.setdefault(name, {"name": name, "seconds": [], "bytes": total})
                one["seconds"].append(round(seconds, 4))
                one["written"] = written
                if name == "complete save":
                    remove(str(max(folder.glob("step-*"), key=lambda path: int(path.name[5:]))))
        for path in folder.glob("step-*"):
            assert checkpointer.open(path).verify().ok
    return list(samples.values())


def table(found: list[dict[str, Any]]) -> Grid:
    """Return the table of ``measure``'s results."""
    floor = statistics.median(found[0]["seconds"])
    rows: list[tuple[str, ...]] = []
    for one in found:
        ratios = [seconds / reference for seconds, reference in zip(one["seconds"], found[0]["seconds"])]
        written = "" if one["written"] is None else f"{one['written'] / one['bytes']:.4%}"
        rows.append(
            (one["name"], f"{statistics.median(one['seconds']):.3f}", f"{statistics.median(ratios):.2f}", written)
        )
    title = f"{found[0]['bytes'] / 1e9:.2f} GB; one hash takes {floor:.3f} s"
    return Grid(title, ("", "seconds", "of a hash", "written"), rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="On the disk to measure; by default the temporary directory.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"gigabytes": options.gigabytes, "rounds": options.rounds, "threads": 1}
    command = f"python -m benchmarks.incremental --gigabytes {options.gigabytes} --rounds {options.rounds}"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        document = results.header(command, settings, Path(folder))
        document["results"] = measure(int(options.gigabytes * 1e9), options.rounds, Path(folder))
    show(table(document["results"]), Console(width=120))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, []), indent=1) + "\n")


if __name__ == "__main__":
    main()
