"""From samples to figures: medians, spreads, and ratios to the floors of the same run; and what is stored with them."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "FIGURES",
    "Figure",
    "Spread",
    "figure",
    "floor_of",
    "floors",
    "header",
    "publishable",
    "resharding",
    "stages",
]

Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Spread:
    """The median of some runs, their least and their greatest."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Figure:
    """One thing that is measured: where it is in a sample, and the floors (the lowest counts) it is a multiple of; with
    no floor but ``of_state`` it is a multiple of the state's bytes."""

    title: str
    part: str
    key: str
    floors: tuple[str, ...] = ()
    floors_on_ranks: tuple[str, ...] = ()
    of_state: bool = False


FIGURES = {
    "stall": Figure("stall", "save", "stall_s", ("memcpy",), ("memcpy_2",)),
    "durable": Figure("durable", "save", "durable_s", ("direct_write",), ("direct_write",)),
    "cold": Figure("load, cold", "cold", "seconds", ("direct_read", "buffered_read"), ("direct_read", "buffered_read")),
    "warm": Figure("load, warm", "warm", "seconds", ("cached_read",), ("cached_read_2",)),
    "save_cpu": Figure("CPU of save", "save", "cpu_s"),
    "load_cpu": Figure("CPU of load", "warm", "cpu_s"),
    "save_peak": Figure("memory of save / state", "save", "peak_bytes", of_state=True),
    "load_peak": Figure("memory of load / state", "cold", "peak_bytes", of_state=True),
    "read": Figure("bytes read / wanted", "cold", "read_bytes", of_state=True),
    "wire": Figure("bytes sent by save", "save", "wire_bytes"),
}


def spread(values: Sequence[float]) -> Spread | None:
    """None of no values."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def floors(result: Mapping[str, Any]) -> dict[str, Spread]:
    """Every floor that could be measured, of one workload or layout."""
    found: dict[str, list[float]] = {}
    for sample in result["floors"]:
        for name, seconds in sample.items():
            if seconds is not None:
                found.setdefault(name, []).append(seconds)
    return {name: each for name, values in found.items() if (each := spread(values)) is not None}


def figure(which: Figure, samples: Samples) -> Spread | None:
    """One figure of one contestant; None if it was not measured. Cold loads that were not cold do not count."""
    values = []
    for sample in samples:
        part = sample.get(which.part, {})
        if which.key in part and not (which.part == "cold" and part["cached"] > 0):
            values.append(part[which.key])
    return spread(values)


def floor_of(which: Figure, result: Mapping[str, Any]) -> float | None:
    """What the figure is a multiple of: seconds, or bytes. None if there is no such thing."""
    if which.of_state:
        return float(result["bytes"])
    known = floors(result)
    names = which.floors_on_ranks if "ranks" in result else which.floors
    return min((known[name].median for name in names if name in known), default=None)


def resharding(result: Mapping[str, Any], name: str, source: str, part: str, key: str = "seconds") -> Spread | None:
    """A load of what ``source`` saved, by contestant ``name`` of a resharding result."""
    return figure(Figure("", f"{source} {part}", key), result["contestants"].get(name, {}).get("samples", []))


def stages(samples: Samples, part: str) -> dict[str, float]:
    """Median seconds of the inner steps of a save or load."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for step, seconds in sample.get(part, {}).get("stages", {}).items():
            found.setdefault(step, []).append(seconds)
    return {step: statistics.median(values) for step, values in found.items()}


def publishable(value: Any, folders: Sequence[Path]) -> Any:
    """The same document with seconds to a microsecond (more digits are noise) and without the paths of this machine,
    which may stand in errors."""
    if isinstance(value, dict):
        return {key: publishable(inner, folders) for key, inner in value.items()}
    if isinstance(value, list):
        return [publishable(inner, folders) for inner in value]
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(str(folder.resolve()), "...").replace(str(folder), "...")
        return value
    return round(value, 6) if isinstance(value, float) else value


def header(command: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a reader must know of a run: how, when, with what, and on what kind of machine (but not which)."""
    return {
        "schema": 1,
        "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "settings": dict(settings),
        "machine": {
            "processor": _line("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "kernel": platform.release().split("-")[0],
            "file_system": _file_system(folder),
            "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _line(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines() if os.path.exists(path) else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def _chosen(path: str) -> str:
    text = Path(path).read_text() if os.path.exists(path) else ""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _file_system(folder: Path) -> str:
    """The type of the file system that is mounted deepest above ``folder``."""
    found = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]
