"""Write ``docs/performance.md`` and its plots from stored samples.

python -m benchmarks.report [benchmarks/results/performance.json] [--docs docs]
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.codecs import table as codecs_table
from benchmarks.first_save import table as first_save_table
from benchmarks.foreign_loads import table as foreign_table
from benchmarks.incremental import table as incremental_table
from benchmarks.long_run import series
from benchmarks.long_run import table as long_run_table
from benchmarks.merge_stage import table as merge_table
from benchmarks.object_store import table as object_store_table
from benchmarks.results import FIGURES, figure, floor_of
from benchmarks.same_name import table as same_name_table
from benchmarks.scale_table import job_grids
from benchmarks.tables import Grid, contestants, floor_grid, profile, reshard, training_steps

__all__ = ["INTRODUCTION", "write"]

_ROOT = Path(__file__).resolve().parent.parent
_PANELS = ("stall", "durable", "cold", "warm")
# By color scheme: background and text, the bars of this library and of others, and lines.
_SCHEMES = {
    "light": ("#ffffff", "#1c2430", "#1b6ca8", "#b9c4cc", ("#1f77b4", "#e06c00", "#2ca02c")),
    "dark": ("#161b22", "#dfe5ec", "#4f9bd6", "#56616e", ("#6cb4ee", "#ffa657", "#7ccf7c")),
}

INTRODUCTION = """\
# Performance

<!-- Written by `python -m benchmarks.report`; do not edit. -->

Every number is a multiple of a *floor*: the time that the machine itself takes for the same bytes, measured in the same
run. The compared systems take turns (A B C A B C ...), each in a separate process that keeps running, as a trainer
does. The first round warms up and is dropped; medians are shown. A load counts only if it restores every tensor bit
for bit.

- **stall** is the time that training loses: the time of the call, plus the slowdown of later steps (compared with their
  average over 0.3 s) until the save is durable. Floor: *memcpy*, one thread, into warm memory. A synchronous save
  stalls until it returns. If a system copies during training, the benchmark waits for its lock once per second, as
  an optimizer would, and counts the wait.
- **durable** ends when files and directories are synced. If a system does not sync, the benchmark does, and counts it.
  Floor: *direct write*: aligned memory, O_DIRECT from 4 threads, preallocated, fdatasync, directory synced.
- **load, cold**: the files were evicted from the page cache, and mincore(2) confirms that no page remains. Floor: the
  faster of O_DIRECT from 4 threads and one buffered stream.
- **load, warm**: all files are in the page cache. Floor: *cached read*, `preadv` from one thread into warm memory.
  Saves and cold loads bypass the page cache, so a second load right after one of them is cold, too.
- A load fills existing tensors, as resuming requires; a memory map does not count.
- **memory** is the peak growth of a process and its children, as a share of the state; for saves it includes memory
  that is kept between saves. **CPU** covers all threads and children, in seconds, without the training steps.
  **bytes read / requested** counts bytes from the disk in the cold load.
- Over ranks: the slowest rank's time, and all ranks' CPU, memory and bytes. The memory floors use two threads. Bytes
  sent are those of the machine's loopback interface during the save.

All of this ran on CPUs. `make gpu` measures stall, gate, save, load and push on a machine with a GPU, and replaces
[performance/gpu.md](performance/gpu.md).
"""


def write(results: Path, docs: Path) -> Path:
    """Write ``performance.md`` and ``performance/*.svg`` below ``docs``; return the page."""
    document = json.loads(results.read_text())
    pictures = docs / "performance"
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.svg"):
        old.unlink()
    page = docs / "performance.md"
    parts = [*_sections(document, pictures), *_peers(results.parent / "peers.json")]
    parts += _first_save(results.parent / "first_save.json")
    parts += _merge_stage(results.parent / "merge_stage.json")
    parts += _foreign_loads(results.parent / "foreign_loads.json")
    parts += _codecs(results.parent / "codecs.json")
    parts += _incremental(results.parent / "incremental.json")
    parts += _object_store(results.parent / "object_store.json")
    parts += _same_name(results.parent / "same_name.json")
    parts += _long_run(results.parent / "long_run.json", pictures)
    page.write_text("\n".join([*parts, *_planning(results.parent / "scale_planning.json")]))
    return page


def _peers(results: Path) -> list[str]:
    """Return the section on a run of ``benchmarks.run`` with the systems in separate environments, if there is one.

    These are measured with fewer rounds and workloads, so their run is not that of the tables above.
    """
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    by_workload = document["save_load"]
    return [
        "## Other systems\n",
        *textwrap.wrap(
            "The systems above and those that need separate environments take turns, in one process each. Each is "
            "configured as its documentation advises. Orbax is made for JAX and has no support of PyTorch tensors: it "
            "saves NumPy arrays in the memory of the tensors, which it copies before the call of an asynchronous save "
            "returns, and a load copies the arrays that it restores into the tensors. Stalls of one system differ by a "
            "factor of up to seven between rounds, as the samples show. "
            f"Versions: {_versions(document)}. All samples are in [peers.json](../benchmarks/results/peers.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(floor_grid(by_workload), titled=False),
        *(_markdown(contestants(result), titled=False) for result in by_workload.values()),
    ]


def _first_save(results: Path) -> list[str]:
    """Return the section on ``benchmarks.first_save``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## The first save of a process\n",
        *textwrap.wrap(
            "Each process is new, and the kinds of processes take turns. The first save finds no staging memory. In "
            "virtual machines whose host takes free memory back, as here, faulting in is as slow in every new process "
            "(0.3 GB/s per thread). *x synchronous* is the median of the ratios to the first synchronous save of the "
            f"same round. {document['settings']['pause_s']:g} s of training separate the two saves. Memory is the peak "
            "of the second save, compared with the memory before the first one. All samples are in "
            "[first_save.json](../benchmarks/results/first_save.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(first_save_table(document["result"])),
    ]


def _long_run(results: Path, pictures: Path) -> list[str]:
    """Return the section on ``benchmarks.long_run``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    drawn = series(document["result"])

    def draw(_ours: str, _theirs: str) -> None:
        _, axes = plt.subplots(1, len(drawn), figsize=(12, 2.6), layout="constrained")
        for axis, (title, lines) in zip(axes, drawn.items(), strict=True):
            for name, (minutes, values) in lines.items():
                axis.plot(minutes, values, label=name, linewidth=0.8)
            axis.set_title(title)
            axis.set_xlabel("minutes")
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False)
            axis.spines[["top", "right"]].set_visible(False)

    return [
        "## A long run\n",
        *textwrap.wrap(
            "Two ranks train an FSDP-2 model of 0.5 M parameters on a file system with room for six checkpoints, and "
            "save every step: asynchronous, incremental saves, of which the newest three are kept. A third process "
            "loads the newest checkpoint into a plain model all the time, and checks that it is of one step. All "
            "samples are in [long_run.json](../benchmarks/results/long_run.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(long_run_table(document["result"])),
        _picture(pictures / "long-run", "Latencies, memory and disk during the run", draw),
    ]


def _same_name(results: Path) -> list[str]:
    """Return the section on ``benchmarks.same_name``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## The ByteCheckpoint package, over two ranks\n",
        *textwrap.wrap(
            "The open package of the same name, 0.0.2, with `fast_saving` and `fast_loading`, and this library take "
            "turns, each in a new job of two ranks. The second save counts: the first one finds no staging memory. "
            "Figures are those of the slowest rank. The package reports the end of a save on rank 0 and does not sync "
            "its files; the sync is added. Loads find the bytes in the page cache. All samples are in "
            "[same_name.json](../benchmarks/results/same_name.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(same_name_table(document["result"])),
    ]


def _merge_stage(results: Path) -> list[str]:
    """Return the section on ``benchmarks.merge_stage``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    scale, rounds = document["settings"]["scale"], document["settings"]["rounds"]
    return [
        "## Whole tensors\n",
        *textwrap.wrap(
            "The merge stage, decomposition, and DCP, for which FSDP gathers every parameter. The figures are medians, "
            "except for the second column: the fastest round as a multiple of the fastest one with decomposition. The "
            "first two columns cover the call alone. All samples are in "
            "[merge_stage.json](../benchmarks/results/merge_stage.json). To reproduce:",
            118,
        ),
        "",
        f"    python -m benchmarks.merge_stage --scale {scale:g} --rounds {rounds}",
        "",
        *(_markdown(merge_table(result)) for result in document["results"]),
    ]


def _foreign_loads(results: Path) -> list[str]:
    """Return the section on ``benchmarks.foreign_loads``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## Loads of other systems' checkpoints\n",
        *textwrap.wrap(
            "This library and the other system load the same files, in turns, into new processes, which have loaded "
            "them once before: the first load of a process also imports modules, of this library for about 0.2 s. "
            "Seconds are those of the slowest rank, with the files in the page cache. *read* is what all ranks read "
            "from files, as a multiple of what their shards need. It is below 1 for ZeRO-3, whose master weights "
            "model and optimizer both request, and which are read once. "
            "All samples are in [foreign_loads.json](../benchmarks/results/foreign_loads.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(foreign_table(document["result"])),
    ]


def _codecs(results: Path) -> list[str]:
    """Return the section on ``benchmarks.codecs``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## Codecs\n",
        *textwrap.wrap(
            "What `save(..., codec=)` makes of weights (Gaussian, as trained ones nearly are) and of Adam's moments, "
            "in chunks of 256 KiB. *ratio* is encoded bytes per byte; rates are bytes per processor time. A save "
            "encodes at `cores * encode`, a store of rate `s` takes `s / ratio`, and the smaller of both counts: "
            'encoding pays where that exceeds `s`, which is what `codec="auto"` finds out. All samples are in '
            "[codecs.json](../benchmarks/results/codecs.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(codecs_table(document["results"]), titled=False),
    ]


def _incremental(results: Path) -> list[str]:
    """Return the section on ``benchmarks.incremental``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## Incremental saves\n",
        *textwrap.wrap(
            'Saves with `base="auto"` on a local disk, and a complete save. The unit is the time in which one thread '
            "computes the checksums of all bytes. *written* is the share of the state's bytes. All samples are in "
            "[incremental.json](../benchmarks/results/incremental.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(incremental_table(document["results"]), titled=False),
    ]


def _object_store(results: Path) -> list[str]:
    """Return the section on ``benchmarks.object_store``, if there are results."""
    if not results.exists():
        return []
    document = json.loads(results.read_text())
    return [
        "## An object store\n",
        *textwrap.wrap(
            f"{document['settings']['server']}, on the same two cores, over HTTP without TLS, so that every client "
            "signs the bytes (SHA-256). The floor is obstore's multipart put of one buffer (16 MiB, 8 at a time), and "
            "its ranged gets (8 MiB, 8 at a time), whose bytes are dropped; *streamed* is its put of an iterator of "
            "parts. Shares of the floor compare the rates within one round. Memory is the peak growth of the client's "
            "process since before its first request: it includes the code of the clients, and the buffers that saves "
            "and loads keep. A load counts only if every tensor is restored bit for bit. All samples are in "
            "[object_store.json](../benchmarks/results/object_store.json).",
            118,
        ),
        "",
        _where(document),
        _markdown(object_store_table(document["result"])),
    ]


def _planning(results: Path) -> list[str]:
    """Return the section on ``benchmarks.scale_planning``, if there are results."""
    if not results.exists():
        return []
    rows = json.loads(results.read_text())
    chunk_size = max(row["manifest"]["chunk_size"] for row in rows if "manifest" in row)
    return [
        "## Planning at scale\n",
        *textwrap.wrap(
            "Simulated jobs of 1T parameters, planned, committed and opened with the library's own protocol code in "
            "one process; seconds are those of one CPU. ZeRO-1 with tensor parallel 8 x pipeline 16 over a dense model "
            "and over experts (sharded by tensor parallelism, or whole on 8 ranks: ep); Megatron-core's grouped "
            "experts and distributed optimizer, with expert parallelism 8; FSDP over all ranks, or over 512 with "
            f"replicas. One checksum per {chunk_size >> 20} MiB. Equal work takes up to twice the time on another "
            "machine, so compare the rows. All figures are in "
            "[scale_planning.json](../benchmarks/results/scale_planning.json). To reproduce:",
            118,
        ),
        "",
        "    python -m benchmarks.scale_planning --json benchmarks/results/scale_planning.json",
        "    python -m benchmarks.scale_planning --ranks 131072 --case dense   # the row of 131,072 ranks, 2026-11-27",
        "",
        *(_markdown(grid) for grid in job_grids(rows)),
    ]


def _sections(document: Mapping[str, Any], pictures: Path) -> list[str]:
    by_workload = document.get("save_load", {})
    ranks = document.get("ranks", {})
    layouts = ranks.get("layouts", {})
    parts = [INTRODUCTION, _about(document), "## Floors\n", _markdown(floor_grid(by_workload), titled=False)]
    for heading, results in (("One process", by_workload), ("Over ranks", layouts)):
        if results:
            parts.append(f"## {heading}\n")
        if results is layouts and "run" in ranks:
            parts.append(_where(ranks["run"]))
        for name, result in results.items():
            parts.append(_markdown(contestants(result)))
            if result["contestants"]:
                alternative = f"{result['title']}: multiples of the floors"
                parts.append(_picture(pictures / name, alternative, partial(_draw, result)))
    if ranks.get("reshard"):
        parts += ["## Loading into another layout\n", _markdown(reshard(ranks["reshard"]), titled=False)]
    everything = {**by_workload, **layouts}
    if (slowed := training_steps(everything)).rows:
        parts += [
            "## Training steps during a save\n",
            *textwrap.wrap(
                "Each step is ten products of 256 x 256 matrices on one thread, with Python between them. A save that "
                "computes, holds the GIL or fills the memory bus slows them. With a gate, a step waits for the copy "
                "once in a second.",
                118,
            ),
            "",
            _markdown(slowed, titled=False),
        ]
    if by_workload or layouts:
        parts.append("## Where the time goes\n")
        parts += [_markdown(profile(everything, name)) for name in ("bytecheckpoint", "bytecheckpoint async")]
    return parts


def _where(run: Mapping[str, Any]) -> str:
    """Describe when, how and on what machine a run was made, if it is not the run of the whole page."""
    machine, settings = run["machine"], run["settings"]
    length = f"{settings['rounds']} rounds" if "rounds" in settings else f"{settings['minutes']:g} minutes"
    remark = f" {settings['remark']}" if settings.get("remark") else ""
    lines = [
        f"Run of {run['created']}: {length}, torch threads per process: {settings['threads']};",
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, Linux {machine['kernel']},",
        f"{machine['file_system']}, huge pages: {machine['huge_pages']}.{remark} To reproduce:",
        "",
        f"    {run['command']}",
        "",
    ]
    return "\n".join(lines)


def _about(document: Mapping[str, Any]) -> str:
    machine, settings = document["machine"], document["settings"]
    lines = [
        f"Run of {document['created']}: {settings['rounds']} rounds, torch threads per process: {settings['threads']};",
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, Linux {machine['kernel']},",
        f"{machine['file_system']}, huge pages: {machine['huge_pages']}.",
        *textwrap.wrap(f"Versions: {_versions(document)}.", 118),
        "All samples are in [performance.json](../benchmarks/results/performance.json). To reproduce:",
        "",
        f"    {document['command']}",
        "",
        "or `make bench`, which also writes this page.",
        "",
    ]
    return "\n".join(lines)


def _versions(document: Mapping[str, Any]) -> str:
    """Return the versions of everything that was measured."""
    versions = {**document["versions"]}
    for result in document.get("save_load", {}).values():
        for contestant in result["contestants"].values():
            versions |= contestant["versions"]
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _markdown(grid: Grid, *, titled: bool = True) -> str:
    if not grid.rows and not grid.remarks:
        return ""
    lines = [f"### {grid.title}\n"] if titled else []
    lines.append("| " + " | ".join(grid.columns) + " |")
    lines.append("| --- |" + " ---: |" * (len(grid.columns) - 1))
    for row in grid.rows:
        cells = [
            f"**{cell}**" if index == 0 and cell.startswith("bytecheckpoint") else cell
            for index, cell in enumerate(row)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- {remark}" for remark in grid.remarks]
    return "\n".join(lines) + ("\n" if grid.remarks else "")


def _picture(path: Path, alternative: str, draw: Callable[[str, str], None]) -> str:
    """Draw a picture in both color schemes, with the colors for this library and others; return it as text."""
    parts = ("text.", "axes.label", "axes.title", "axes.edge", "xtick.", "ytick.")
    for scheme, (background, ink, ours, theirs, lines) in _SCHEMES.items():
        style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 8}
        style |= {"figure.constrained_layout.h_pad": 0.08, "axes.prop_cycle": cycler(color=lines)}
        style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), background)
        style |= {f"{part}color": ink for part in parts}
        with mpl.rc_context(style):
            draw(ours, theirs)
            plt.savefig(path.with_name(f"{path.name}-{scheme}.svg"), metadata={"Date": None})
            plt.close()
    light, dark = (f"{path.parent.name}/{path.name}-{scheme}.svg" for scheme in _SCHEMES)
    text = [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">',
        f'  <img src="{light}"',
        f'    alt="{alternative}">',
        "</picture>\n",
    ]
    return "\n".join(text)


def _draw(result: Mapping[str, Any], ours: str, theirs: str) -> None:
    """Draw one panel per figure: multiples of the floor, medians as bars, minimum and maximum as whiskers."""
    ink = mpl.rcParams["text.color"]
    names = [name for name, contestant in result["contestants"].items() if not contestant["failure"]]
    _, axes = plt.subplots(1, len(_PANELS), figsize=(12, 0.6 + 0.24 * len(names)), sharey=True, layout="constrained")
    for axis, key in zip(axes, _PANELS):
        which = FIGURES[key]
        floor = floor_of(which, result)
        for row, name in enumerate(reversed(names)):
            found = figure(which, result["contestants"][name]["samples"])
            if found is None or not floor:
                continue
            median, low, high = found.median / floor, found.low / floor, found.high / floor
            color = ours if name.startswith("bytecheckpoint") else theirs
            whiskers = {"linewidth": 0.7, "ecolor": ink}
            axis.barh(row, median, xerr=[[median - low], [high - median]], color=color, error_kw=whiskers)
            axis.annotate(
                f"{median:.2f}", (max(high, 0.0), row), xytext=(2, 0), textcoords="offset points", va="center"
            )
        axis.axvline(1.0, color=ink, linewidth=0.8, linestyle=":")
        axis.set_title(f"{which.title} (1 = floor)")
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_yticks(range(len(names)), list(reversed(names)))


def main() -> None:
    """Read the arguments and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=_ROOT / "benchmarks" / "results" / "performance.json")
    parser.add_argument("--docs", type=Path, default=_ROOT / "docs")
    options = parser.parse_args()
    print(write(options.results, options.docs))


if __name__ == "__main__":
    main()
