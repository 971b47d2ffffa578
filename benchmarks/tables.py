"""Build tables for the console and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import FIGURES, figure, floor_of, floors, resharding, stages

__all__ = ["Grid", "contestants", "floor_grid", "profile", "reshard", "show", "training_steps"]

_SECONDS = ("stall", "durable", "cold", "warm")
_OTHERS = ("save_cpu", "load_cpu", "save_peak", "load_peak", "read")


@dataclass(frozen=True)
class Grid:
    """A table: title, column headings, rows, and remarks below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    remarks: tuple[str, ...] = ()


def floor_grid(results: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return every floor of every workload, in seconds and GB/s."""
    names = sorted({name for result in results.values() for name in floors(result)})
    rows = []
    for result in results.values():
        known = floors(result)
        cells = [
            f"{known[n].median:.3f} ({_rate(result['bytes'], known[n].median)})" if n in known else "-" for n in names
        ]
        rows.append((f"{result['title']}, {_size(result['bytes'])}", *cells))
    return Grid("Floors: median seconds (GB/s)", ("", *names), rows)


def contestants(result: Mapping[str, Any]) -> Grid:
    """Return all contestants on one workload or layout: seconds, multiples of the floor, and costs."""
    on_ranks = "ranks" in result
    keys = (*_SECONDS, *_OTHERS, *(("wire",) if on_ranks else ()))
    rows, remarks = [], []
    for name, contestant in result["contestants"].items():
        if contestant["failure"]:
            remarks.append(f"{name}: {contestant['failure']}")
            rows.append((name, *["-"] * len(keys)))
            continue
        if contestant.get("note"):
            remarks.append(f"{name}: {contestant['note']}")
        warmer = sum(sample.get("cold", {}).get("cached", 0) > 0 for sample in contestant["samples"])
        if warmer:
            remarks.append(f"{name}: {warmer} cold loads were not cold and do not count")
        rows.append((name, *(_cell(key, result, contestant["samples"]) for key in keys)))
    if result.get("failure"):
        remarks.append(result["failure"])
    tensors = f", {result['tensors']} tensors" if "tensors" in result else ""
    title = f"{result['title']}: {_size(result['bytes'])}{tensors}" if "bytes" in result else result["title"]
    return Grid(title, ("", *(FIGURES[key].title for key in keys)), rows, tuple(remarks))


def reshard(results: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return loads into other layouts, as multiples of the same-layout load of the same bytes."""
    columns = ("", "from", "into", "cold", "/ same layout", "warm", "/ same layout", "bytes read / requested")
    rows, remarks = [], []
    for target, result in results.items():
        if result["failure"]:
            remarks.append(f"{target}: {result['failure']}")
        for name, contestant in result["contestants"].items():
            if contestant["failure"]:
                remarks.append(f"{name} into {target}: {contestant['failure']}")
                continue
            for source in result["sources"]:
                cells = []
                for part in ("cold", "warm"):
                    found, same = (resharding(result, name, at, part) for at in (source, target))
                    cells += (
                        [f"{found.median:.3f}", f"{found.median / same.median:.2f}"] if found and same else ["-", "-"]
                    )
                read = resharding(result, name, source, "cold", "read_bytes")
                cells.append(f"{read.median / result['bytes']:.2f}" if read else "-")
                rows.append((name, source, target, *cells))
    return Grid("Resharding", columns, rows, tuple(remarks))


def profile(results: Mapping[str, Mapping[str, Any]], name: str) -> Grid:
    """Return the median milliseconds of one contestant's steps."""
    found = []
    for result in results.values():
        samples = result["contestants"].get(name, {}).get("samples", [])
        found += [(result["title"], part, stages(samples, part)) for part in ("save", "cold", "warm")]
    found = [entry for entry in found if entry[2]]
    steps = list(dict.fromkeys(step for _, _, times in found for step in times))
    rows = [
        (title, part, *(f"{times[s] * 1e3:.1f}" if s in times else "" for s in steps)) for title, part, times in found
    ]
    return Grid(f"Steps of {name}, ms", ("", "", *steps), rows)


def training_steps(results: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return the times of training steps before and during asynchronous saves: medians of the rounds, ms."""
    keys = [f"step_{when}_p{share}_s" for share in (50, 99) for when in ("before", "during")]
    rows = []
    for result in results.values():
        for name, contestant in result["contestants"].items():
            saves = [sample["save"] for sample in contestant.get("samples", []) if "save" in sample]
            saves = [save for save in saves if keys[0] in save]
            if saves:
                cells = [f"{median(save[key] for save in saves) * 1e3:.1f}" for key in keys]
                rows.append((result["title"], name, *cells))
    columns = ("", "", "p50 without a save", "p50 during it", "p99 without a save", "p99 during it")
    return Grid("Training steps, ms", columns, rows)


def show(grid: Grid, console: Console) -> None:
    """Print a table on the console."""
    if not grid.rows and not grid.remarks:
        return
    table = Table(title=grid.title, title_justify="left")
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    console.print(table)
    for remark in grid.remarks:
        console.print(f"  {remark}", highlight=False, markup=False)


def _cell(key: str, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    which = FIGURES[key]
    found, floor = figure(which, samples), floor_of(which, result)
    if found is None:
        return "-"
    if which.of_state:
        return f"{found.median / floor:.2f}" if floor else "-"
    if which.key.endswith("bytes"):
        return _size(int(found.median))
    ratio = f" ({found.median / floor:.2f}x)" if floor else ""
    return f"{found.median:.3f}{ratio}"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9 / seconds:.2f}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
