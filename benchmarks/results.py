"""Compute figures from samples: medians, spreads, ratios to the floors of the same run; and describe the run."""

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
    """Median, minimum and maximum of some runs."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Figure:
    """One figure: its place in a sample, and the floors that it is a multiple of (the lowest counts).

    With ``of_state`` and no floor it is a multiple of the state's bytes.
    """

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
    "read": Figure("bytes read / requested", "cold", "read_bytes", of_state=True),
    "wire": Figure("bytes sent by save", "save", "wire_bytes"),
}


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread, or None without values."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def floors(result: Mapping[str, Any]) -> dict[str, Spread]:
    """Return every measured floor of one workload or layout."""
    found: dict[str, list[float]] = {}
    for sample in result["floors"]:
        for name, seconds in sample.items():
            if seconds is not None:
                found.setdefault(name, []).append(seconds)
    return {name: each for name, values in found.items() if (each := spread(values)) is not None}


def figure(which: Figure, samples: Samples) -> Spread | None:
    """Return one figure of a contestant, or None if it was not measured. Cold loads of cached files do not count."""
    values = []
    for sample in samples:
        part = sample.get(which.part, {})
        if which.key in part and not (which.part == "cold" and part["cached"] > 0):
            values.append(part[which.key])
    return spread(values)


def floor_of(which: Figure, result: Mapping[str, Any]) -> float | None:
    """Return the seconds or bytes that the figure is a multiple of, or None."""
    if which.of_state:
        return float(result["bytes"])
    known = floors(result)
    names = which.floors_on_ranks if "ranks" in result else which.floors
    return min((known[name].median for name in names if name in known), default=None)


def resharding(result: Mapping[str, Any], name: str, source: str, part: str, key: str = "seconds") -> Spread | None:
    """Return the figure of a load by contestant ``name`` from a checkpoint of layout ``source``."""
    return figure(Figure("", f"{source} {part}", key), result["contestants"].get(name, {}).get("samples", []))


def stages(samples: Samples, part: str) -> dict[str, float]:
    """Return the median seconds of the inner steps of a save or load."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for step, seconds in sample.get(part, {}).get("stages", {}).items():
            found.setdefault(step, []).append(seconds)
    return {step: statistics.median(values) for step, values in found.items()}


def publishable(value: Any, folders: Sequence[Path]) -> Any:
    """Return the document with seconds rounded to microseconds, and without this machine's paths in errors."""
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
    """Describe a run: how, when, with which versions, and on what kind of machine (but not which one)."""
    return {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
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
    """Return the type of the file system that contains ``folder``."""
    found = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]
