"""Compare the merge stage with decomposition and with blocking gathers, for FSDP-1's flat parameters.

    python -m benchmarks.merge_stage [--ranks 2 4] [--scale 1] [--rounds 5] [--json benchmarks/results/merge_stage.json]

The state is GPT-2 with Adam under FSDP-1, whose shards do not form a regular grid. Contestants take turns in every
round: this library, asynchronously, with ``layout`` "shards" (decomposed in place), "merged" and "whole"; and DCP with
sharded and with full state dicts, for which FSDP gathers every parameter before the save. Times are those of the
slowest rank. Bytes sent are those of the loopback interface. Reads count the calls of all ranks in a warm load of the
same layout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import bytecheckpoint as bcp
from benchmarks.layouts import RankState, build
from benchmarks.measure import Meter, Sample, wire_bytes
from benchmarks.page_cache import warm
from benchmarks.peers.base import Contestant, Pending
from benchmarks.peers.dcp import Dcp
from benchmarks.tables import Grid, show
from bytecheckpoint.planners.gather_plan import Layout
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["main"]

_LAYOUT = "fsdp1-flat-2"  # on any number of ranks
_TIMEOUT_S = 1500.0


class _Merging(Contestant):
    """This library: asynchronous saves with one layout."""

    durable = True

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._checkpointer = bcp.Checkpointer()
        self._stages: Mapping[str, float] = {}

    def save(self, path: str, state: Any) -> Pending | None:
        handle = self._checkpointer.save(
            path, state.sections, async_save=True, options=bcp.SaveOptions(layout=self._layout)
        )
        self._stages = handle.timings.seconds
        return Pending(handle.result)

    def load(self, path: str, state: Any) -> None:
        self._stages = self._checkpointer.load(path, state.sections).timings.seconds

    def stages(self) -> Mapping[str, float]:
        return dict(self._stages)

    def close(self) -> None:
        self._checkpointer.close()


class _DcpFull(Dcp):
    """DCP with full state dicts: every rank gathers all tensors, then DCP writes each tensor once.

    Without ``cpu_offload``, which torch does not support for parameters that are already on the CPU.
    """

    _OPTIONS = StateDictOptions(full_state_dict=True)

    def save(self, path: str, state: Any) -> Pending | None:
        model, optimizer = get_state_dict(state.model, state.optimizer, options=self._OPTIONS)
        save({"model": model, "optimizer": optimizer}, storage_writer=self._writer(path))
        return None

    def load(self, path: str, state: Any) -> None:
        # Every rank reads the same files into sharded state dicts, as a user would.
        model, optimizer = get_state_dict(state.model, state.optimizer)
        values = {"model": model, "optimizer": optimizer}
        load(values, checkpoint_id=path)
        set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def _contestants() -> dict[str, Contestant]:
    return {
        "shards": _Merging("shards"),
        "merged": _Merging("merged"),
        "whole": _Merging("whole"),
        "DCP sharded": Dcp(),
        "DCP full": _DcpFull(),
    }


def _measure(rank: int, world_size: int, scale: float, rounds: int, work: str) -> dict[str, Any]:
    """Run rounds of saves and warm loads on every rank; return samples by contestant, without the warm-up round."""
    warnings.simplefilter("ignore")
    state = build(_LAYOUT, scale)
    found: dict[str, list[Sample]] = {}
    contestants = _contestants()
    for at in range(rounds + 1):
        for name, contestant in contestants.items():
            sample = _turn(rank, contestant, state, os.path.join(work, name.replace(" ", "-")))
            if at:
                found.setdefault(name, []).append(sample)
    for contestant in contestants.values():
        contestant.close()
    return {"bytes": state.total_nbytes, "samples": found}


def _turn(rank: int, contestant: Contestant, state: RankState, path: str) -> Sample:
    meter = Meter(contestant)
    dist.barrier()
    sent = wire_bytes()
    sample = meter.save(path, state)
    dist.barrier()
    sample["wire_bytes"] = wire_bytes() - sent
    sample["file_bytes"] = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    if rank == 0:
        warm(path)
    state.scramble()
    gc.collect()
    dist.barrier()
    reads, sent = _read_calls(), wire_bytes()
    loaded = meter.load(path, state)
    sample["reads"] = _read_calls() - reads
    dist.barrier()
    sample |= {"load_s": loaded["seconds"], "load_cpu_s": loaded["cpu_s"], "load_wire_bytes": wire_bytes() - sent}
    wrong = state.difference()
    if wrong is not None:
        raise AssertionError(f"{type(contestant).__name__} brought back another {wrong}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    meter.close()
    return sample


def _read_calls() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("syscr:"):
            return int(line.split()[1])
    return 0


def _merged(samples: list[Sample]) -> Sample:
    """Merge the samples of all ranks: the slowest rank's times, sums of work, and the machine's figures once."""
    merged: Sample = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if key == "stages":
            merged[key] = {step: max(one.get(step, 0.0) for one in values) for step in values[0]}
        elif key in ("cpu_s", "load_cpu_s", "reads"):
            merged[key] = sum(values)
        else:
            merged[key] = max(values)
    return merged


def measure(ranks: int, scale: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the slowest rank's samples by contestant."""
    with tempfile.TemporaryDirectory(prefix="merge-", dir=folder) as work, RankPool(ranks) as pool:
        answers = pool.run(_measure, scale, rounds, work, timeout_s=_TIMEOUT_S)
    names = answers[0]["samples"]
    turns = {name: [_merged([a["samples"][name][at] for a in answers]) for at in range(rounds)] for name in names}
    return {"ranks": ranks, "bytes": answers[0]["bytes"], "contestants": turns}


def table(result: dict[str, Any]) -> Grid:
    """Show medians, and the fastest call relative to the fastest one with decomposition (least affected by noise)."""
    columns = (
        "",
        "returns after, s",
        "least, x shards",
        "stall, s",
        "durable, s",
        "cpu, s",
        "wire, MB",
        "load, s",
        "reads",
    )
    rows: list[tuple[str, ...]] = []
    base = min(sample["return_s"] for sample in result["contestants"]["shards"])
    for name, samples in result["contestants"].items():
        ratio = min(sample["return_s"] for sample in samples) / base

        def cell(key: str, digits: int = 3, unit: float = 1.0, samples: list[Sample] = samples) -> str:
            return f"{statistics.median(sample[key] for sample in samples) / unit:.{digits}f}"

        rows.append(
            (
                name,
                cell("return_s"),
                f"{ratio:.2f}",
                cell("stall_s"),
                cell("durable_s"),
                cell("cpu_s"),
                cell("wire_bytes", 1, 1e6),
                cell("load_s"),
                cell("reads", 0),
            )
        )
    title = f"FSDP-1 on {result['ranks']} ranks, flat parameters, {result['bytes'] / 1e9:.2f} GB"
    return Grid(title, columns, rows)


def main() -> None:
    """Print a table for each number of ranks, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(ranks, options.scale, options.rounds, options.folder) for ranks in options.ranks]
    for result in results:
        show(table(result), Console(width=160))
    if options.json is not None:
        machine = {"processors": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        settings = {"scale": options.scale, "rounds": options.rounds}
        document = {"machine": machine, "settings": settings, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
