"""Compare slices with whole models: bytes sent to each GPU of an inference engine, and time for new weights.

    python -m benchmarks.scale_delivery [--json FILE] [--page docs/inference-layouts.md]

*Bytes* are exact, for every rank, from the layouts that vLLM's loaders produce (``tests/inference/golden``). They are
compared with checkpoint-engine, which sends the whole model to every GPU. *Times* are simulated from published link
speeds (``delivery_links``), for the rows of checkpoint-engine's published table, and so is its broadcast. Its
published times are longer than the simulated ones by some factor, for reasons that the simulation ignores; the last
column assumes that slices exceed their simulation by the same factor. None of these times was measured.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
from rich.console import Console

from benchmarks.delivery_links import ASSUMPTIONS, H20, H800, SOURCES, Composition, Machine, broadcast, slices
from benchmarks.layout_files import unpack
from benchmarks.tables import Grid, show

__all__ = ["bytes_per_gpu", "grids", "main", "simulate", "with_tables"]

_GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "inference" / "golden"

_MARK = "<!-- The rest is written by `python -m benchmarks.scale_delivery --page`. -->"

# Model, its layouts, GPUs, machine, and the seconds that checkpoint-engine publishes, if any.
_ROWS: list[tuple[str, str, int, Machine, float | None]] = [
    ("GLM-4.5-Air BF16", "glm-4.5-air-tp8", 8, H800, 3.47),
    ("Qwen3-235B-A22B BF16", "qwen3-235b-a22b-tp8", 8, H800, 6.22),
    ("DeepSeek-V3.1 FP8", "deepseek-v3-tp16", 16, H20, 10.19),
    ("DeepSeek-V3.1 FP8", "deepseek-v3-tp16", 64, H20, None),
    ("DeepSeek-V3.1 FP8", "deepseek-v3-tp16", 256, H20, 11.33),
    ("Kimi-K2 FP8", "kimi-k2-tp16", 16, H20, 14.36),
    ("Kimi-K2 FP8", "kimi-k2-tp16", 64, H20, None),
    ("Kimi-K2 FP8", "kimi-k2-tp16", 256, H20, 16.04),
]


def bytes_per_gpu(golden: Path = _GOLDEN) -> list[dict[str, Any]]:
    """Return the model's bytes and the ranks' minimum and maximum for each file of layouts."""
    found = []
    for name, entry in json.loads((golden / "index.json").read_text()).items():
        requested = [rank["requested"] for rank in entry["ranks"]]
        model = entry["ranks"][0]["stored"]
        found.append(
            {
                "layouts": name.removesuffix(".layouts"),
                "ranks": len(requested),
                "model": model,
                "least": min(requested),
                "most": max(requested),
                "share": max(requested) / model,
                "fast": sum(rank["fast"] for rank in entry["ranks"]) / sum(requested),
            }
        )
    return sorted(found, key=lambda row: (str(row["layouts"]).rpartition("-tp")[0], row["ranks"]))


def simulate(golden: Path = _GOLDEN) -> list[dict[str, Any]]:
    """Return the rows of checkpoint-engine's table, and some in between."""
    found = []
    compositions: dict[str, tuple[Composition, float]] = {}
    for title, name, gpus, machine, published in _ROWS:
        if name not in compositions:
            packed = msgpack.unpackb((golden / f"{name}.layouts").read_bytes())
            layout = unpack(packed[0])
            used = {placement.stored for placement in layout.placements}
            whole = sum(tensor.nbytes for number, tensor in enumerate(layout.stored) if number in used)
            compositions[name] = Composition.of(layout.parts(), len(packed)), float(whole)
        composition, model = compositions[name]
        ours, theirs = slices(composition, gpus, machine), broadcast(model, composition, gpus, machine)
        missed = published / theirs.seconds if published else None
        found.append(
            {
                "model": title,
                "gpus": gpus,
                "machine": machine.name,
                "bytes": model,
                "composition": asdict(composition) | {"needed": composition.needed},
                "slices": asdict(ours),
                "broadcast": asdict(theirs),
                "published": published,
                "missed": missed,
                "careful": ours.seconds * missed if missed else None,
            }
        )
    return found


def grids(found: dict[str, Any]) -> list[Grid]:
    """Return the tables for the console and the documentation."""
    nbytes: list[tuple[str, ...]] = [
        (
            row["layouts"],
            f"{row['model'] / 1e9:.2f}" if row["model"] > 1e9 else "-",
            f"{row['most'] / 1e9:.2f}" if row["model"] > 1e9 else f"{row['most'] / 1e3:.0f} kB",
            f"{100 * row['share']:.2f} %",
            f"{100 * row['fast']:.1f} %",
            "100 %",
        )
        for row in found["bytes"]
    ]
    times: list[tuple[str, ...]] = [
        (
            row["model"],
            f"{row['gpus']} {row['machine']}",
            f"{row['composition']['needed'] / 1e9:.1f}",
            f"{row['slices']['floor']:.2f}",
            f"{row['slices']['seconds']:.2f} ({_slowest(row['slices']['stages'])})",
            f"{row['broadcast']['seconds']:.2f} ({_slowest(row['broadcast']['stages'])})",
            "-" if row["published"] is None else f"{row['published']:.2f}",
            "-" if row["careful"] is None else f"{row['careful']:.2f}",
        )
        for row in found["times"]
    ]
    return [
        Grid(
            "Bytes to each GPU",
            ("", "model, GB", "largest rank, GB", "of the model", "exactly what is held", "checkpoint-engine"),
            nbytes,
        ),
        Grid(
            "Seconds, simulated",
            (
                "",
                "GPUs",
                "GB to each",
                "floor",
                "slices (slowest stage)",
                "broadcast (slowest stage)",
                "checkpoint-engine, published",
                "slices, missed as much",
            ),
            times,
            tuple(found["assumptions"]),
        ),
    ]


def with_tables(page: str, found: dict[str, Any]) -> str:
    """Return the page with the part after its mark replaced."""
    text, mark, _ = page.partition(_MARK)
    tables = []
    for grid in grids(found):
        aligned = ["---", *["---:"] * (len(grid.columns) - 1)]
        rows = ["| " + " | ".join(cells) + " |" for cells in (grid.columns, aligned, *grid.rows)]
        tables.append(f"## {grid.title}\n\n" + "\n".join([*rows, "", *map(_item, grid.remarks)]).rstrip())
    sources = [_item(f"`{name}`: {source}") for name, source in found["sources"].items()]
    return f"{text}{mark}\n\n" + "\n\n".join([*tables, "Where the figures come from:", "\n".join(sources)]) + "\n"


def _item(text: str) -> str:
    """An item of a list in lines as long as those of a page."""
    return textwrap.fill(
        text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _slowest(stages: dict[str, float]) -> str:
    return max(stages, key=lambda name: stages[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="rewrite the tables of this page of the documentation")
    arguments = parser.parse_args()
    found = {
        "assumptions": list(ASSUMPTIONS),
        "sources": SOURCES,
        "machines": {machine.name: asdict(machine) for machine in (H800, H20)},
        "bytes": bytes_per_gpu(),
        "times": simulate(),
    }
    for grid in grids(found):
        show(grid, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.page:
        arguments.page.write_text(with_tables(arguments.page.read_text(), found))


if __name__ == "__main__":
    main()
