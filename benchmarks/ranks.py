"""Measure saves and loads over ranks, into the same layout and into other layouts.

Every rank measures itself. Reports give the slowest rank's time, and the sums of processor time, memory and bytes.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.floors import Floors
from benchmarks.layouts import LAYOUTS, RankState, build
from benchmarks.measure import Meter, Sample, wire_bytes
from benchmarks.page_cache import evict, tree_bytes, warm
from benchmarks.peers import ENTRIES
from benchmarks.peers.base import Contestant
from benchmarks.worker import create, reason
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

__all__ = ["CONTESTANTS", "TRANSITIONS", "measure"]

CONTESTANTS = ("bytecheckpoint", "bytecheckpoint async", "DCP", "DCP async thread")
"""Those that know of ranks and run without an accelerator."""

TRANSITIONS = (
    ("fsdp2-4", "fsdp2-2"),
    ("fsdp2-2", "fsdp2-4"),
    ("fsdp2-2", "tp-2"),
    ("fsdp1-flat-2", "fsdp2-2"),
)
"""Saved in one layout, loaded into the other."""

_TIMEOUT_S = 1500.0

Turns = list[dict[str, Any]]
Say = Callable[[str], None]


def measure(
    layouts: Sequence[str], *, scale: float, rounds: int, folder: Path, say: Say, names: Sequence[str] = CONTESTANTS
) -> dict[str, Any]:
    """Return ``{"layouts": {layout: {...}}, "reshard": {"a to b": {...}}}``: samples without the warm-up round."""
    chosen = [name for name in CONTESTANTS if name in names]
    found: dict[str, Any] = {"layouts": {}, "reshard": {}}
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=folder) as work:
        for layout in layouts:
            say(f"{layout}: saving and loading")
            found["layouts"][layout] = _in_pool(layout, _save_and_load, scale, rounds, work, chosen)
        loading = [name for name in chosen if len(ENTRIES[name].parts) > 1]
        for layout in layouts:
            sources = [source for source, target in TRANSITIONS if target == layout and source in layouts]
            if sources:
                say(f"{', '.join(sources)} into {layout}")
                one = _in_pool(layout, _load_from_all, scale, rounds, work, loading, [layout, *sources])
                found["reshard"][layout] = {"sources": sources, **one}
    return found


def _in_pool(layout: str, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    world_size = LAYOUTS[layout].world_size
    result: dict[str, Any] = {"title": LAYOUTS[layout].title, "ranks": world_size}
    try:
        with RankPool(world_size) as pool:
            answers = pool.run(function, layout, *arguments, timeout_s=_TIMEOUT_S)
    except RanksFailed as error:
        return {**result, "failure": reason(error), "floors": [], "contestants": {}}
    turns: Turns = [_merged([answer["turns"][at] for answer in answers]) for at in range(len(answers[0]["turns"]))]
    return {
        **result,
        "bytes": answers[0]["bytes"],
        "failure": "",
        "floors": answers[0]["floors"],
        "contestants": {
            name: {"failure": failure or _wrong(name, turns), "samples": [turn[name] for turn in turns if name in turn]}
            for name, failure in answers[0]["failures"].items()
        },
    }


def _save_and_load(
    rank: int, world_size: int, layout: str, scale: float, rounds: int, work: str, names: Sequence[str]
) -> dict[str, Any]:
    """Save, load cold and load warm on every rank; keep the last checkpoint of each contestant for other layouts."""

    def turn(name: str, contestant: Contestant, meter: Meter, state: RankState, last: bool) -> dict[str, Sample]:
        path = _path(work, layout, name)
        if rank == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        dist.barrier()
        sent = wire_bytes()
        samples = {"save": meter.save(path, state)}
        dist.barrier()
        samples["save"] |= {"wire_bytes": wire_bytes() - sent if rank == 0 else 0}
        samples["save"] |= {"file_bytes": tree_bytes(path) if rank == 0 else 0}
        for part in ENTRIES[name].parts[1:]:
            samples[part] = _load(rank, path, part, meter, state)
        dist.barrier()
        if rank == 0 and not (last and len(ENTRIES[name].parts) > 1):
            shutil.rmtree(path, ignore_errors=True)
        return samples

    return _rounds(rank, layout, scale, rounds, work, names, turn)


def _load_from_all(
    rank: int,
    world_size: int,
    layout: str,
    scale: float,
    rounds: int,
    work: str,
    names: Sequence[str],
    sources: Sequence[str],
) -> dict[str, Any]:
    """Load the checkpoint of every source layout on every rank, cold and warm, the same layout first."""

    def turn(name: str, contestant: Contestant, meter: Meter, state: RankState, last: bool) -> dict[str, Sample]:
        return {
            f"{source} {part}": _load(rank, _path(work, source, name), part, meter, state)
            for part in ("cold", "warm")
            for source in sources
        }

    return _rounds(rank, layout, scale, rounds, work, names, turn)


def _rounds(
    rank: int,
    layout: str,
    scale: float,
    rounds: int,
    work: str,
    names: Sequence[str],
    turn: Callable[[str, Contestant, Meter, RankState, bool], dict[str, Sample]],
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    state = build(layout, scale)
    floors = Floors(state.total_nbytes) if rank == 0 else None
    contestants = {name: create(ENTRIES[name]) for name in names}
    failures = dict.fromkeys(names, "")
    found: Turns = []
    floor_samples: Turns = []
    peaks: dict[tuple[str, str], int] = {}
    for at in range(rounds + 1):
        if floors is not None:
            floor_samples.append(floors.measure(os.path.join(work, "floors")))
        samples: dict[str, Any] = {}
        for name, contestant in contestants.items():
            if failures[name]:
                continue
            dist.barrier()
            failure = ""
            meter = Meter(contestant)
            try:
                samples[name] = turn(name, contestant, meter, state, at == rounds)
            except Exception as error:  # noqa: BLE001 - reported, and the contestant is out on all ranks
                failure = reason(error)
            meter.close()
            for part, sample in samples.get(name, {}).items():
                # From the first turn: memory that is kept between turns has grown by then, and is hidden later.
                sample["peak_bytes"] = peaks.setdefault((name, part), sample["peak_bytes"])
            reasons: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(reasons, failure)
            failures[name] = next((text for text in reasons if text), "")
        found.append({name: sample for name, sample in samples.items() if not failures[name]})
    for contestant in contestants.values():
        contestant.close()
    if floors is not None:
        floors.close()
    return {"turns": found[1:], "floors": floor_samples[1:], "failures": failures, "bytes": state.total_nbytes}


def _load(rank: int, path: str, part: str, meter: Meter, state: RankState) -> Sample:
    state.scramble()
    gc.collect()
    dist.barrier()
    cached = (evict if part == "cold" else warm)(path) if rank == 0 else 0.0
    dist.barrier()
    sent = wire_bytes()
    sample = meter.load(path, state)
    dist.barrier()
    sent = wire_bytes() - sent if rank == 0 else 0
    return {**sample, "cached": cached, "wire_bytes": sent, "wrong": state.difference()}


def _path(work: str, layout: str, name: str) -> str:
    return os.path.join(work, layout, name.replace(" ", "-"))


def _merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the samples that all ranks took in one turn."""
    return {
        name: {part: _merged_sample([answer[name][part] for answer in answers]) for part in parts}
        for name, parts in answers[0].items()
    }


def _merged_sample(samples: Sequence[Sample]) -> Sample:
    merged: Sample = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if key == "stages":
            merged[key] = {step: max(value.get(step, 0.0) for value in values) for step in values[0]}
        elif key == "wrong":
            merged[key] = next((value for value in values if value is not None), None)
        elif key.endswith("bytes") or key in ("cpu_s", "cached"):
            merged[key] = sum(values)
        else:
            merged[key] = max(values)
    return merged


def _wrong(name: str, turns: Turns) -> str:
    for turn in turns:
        for part, sample in turn.get(name, {}).items():
            if sample.get("wrong") is not None:
                return f"its load ({part}) brought back wrong bytes in {sample['wrong']}"
    return ""
