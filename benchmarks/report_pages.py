"""Make reports of simulated jobs with `bcp report`, and images of them: `python -m benchmarks.report_pages`.

The root has real manifests and sparse files, and the traces are in the format of `TraceFiles`. One rank writes slowly,
and one group of 64 ranks copies slowly.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.browser import Browser
from bytecheckpoint.cli import cli
from bytecheckpoint.format.checksums import checksum_column, empty_checksums
from bytecheckpoint.format.manifest.document import Manifest, SectionInfo
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, encode
from bytecheckpoint.format.manifest.files import FileTable
from bytecheckpoint.telemetry.save_times import SaveTimes
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable
from bytecheckpoint.version import VERSION

READY = "document.body.dataset.ready"
"""Is true in JavaScript when a report is complete."""

_CHUNK = 1 << 30
_SECONDS = {"check": 0.002, "describe": 0.04, "agree": 0.01, "plan": 0.003, "stage": 0.9, "write": 6.0}
_AFTER = {"confirm": 0.02, "commit": 0.05, "clean": 0.001}
_LOAD = {"check": 0.01, "open": 0.2, "describe": 0.05, "plan": 0.3, "read": 4.0, "apply": 0.1, "report": 0.01}


def _times(ranks: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    found = {step: mean * random.lognormal(0, 0.08, ranks) for step, mean in _SECONDS.items()}
    found["write"][ranks // 3] *= 2.6
    found["stage"][ranks // 2 : ranks // 2 + 64 if ranks > 64 else ranks // 2 + 1] *= 1.7
    return found


def make_root(root: Path, *, ranks: int, checkpoints: int, layers: int = 4, width: int = 8192) -> None:
    """Write checkpoints of a model whose tensors are sharded over all ranks, and the remains of a failed save."""
    for number in range(1, checkpoints + 1):
        folder = root / f"step-{number * 500}"
        folder.mkdir(parents=True)
        manifest = _manifest(ranks, layers, width, number)
        (folder / manifest.attempt).mkdir()
        for name, size in zip(manifest.files.name, manifest.files.size.tolist(), strict=True):
            with (folder / name).open("wb") as file:
                os.truncate(file.fileno(), size)
        (folder / MANIFEST_KEY).write_bytes(encode(manifest))
    begun = root / f"step-{(checkpoints + 1) * 500}" / "attempt-20260102T000000Z-0123456789abcdef"
    begun.mkdir(parents=True)
    (begun / "model-00000.safetensors").touch()


def _manifest(ranks: int, layers: int, width: int, number: int) -> Manifest:
    names = [f"layers.{layer}.{part}" for layer in range(layers) for part in ("attention.wq", "mlp.up")]
    tensors = TensorTable.build([("model", name, BasicMeta(find_dtype("bfloat16"), (width, width))) for name in names])
    edges = [width * rank // ranks for rank in range(ranks + 1)]
    rows = [
        (row, Box((edges[rank], 0), (edges[rank + 1] - edges[rank], width)))
        for row in range(len(names))
        for rank in range(ranks)
    ]
    shards = BoxTable.build(rows)
    nbytes = shards.nbytes(tensors)
    offset = nbytes.reshape(len(names), ranks)
    attempt = f"attempt-20260101T00{number:04d}Z-0123456789abcdef"
    size = offset.sum(0)
    times = _times(ranks, number)
    seconds = sum(float(one.max()) for one in times.values()) + 0.3
    stall = float(np.sum([times[step] for step in _SECONDS if step != "write"], 0).max())
    manifest = Manifest(
        library_version=VERSION,
        step=number * 500,
        created=f"2026-01-01T{number:02d}:00:00.000000Z",
        world_size=ranks,
        attempt=attempt,
        metadata={"metrics": {"loss": 3.0 / number}},
        sections=[SectionInfo("model", "module")],
        files=FileTable(
            name=[f"{attempt}/model-{rank:05d}.safetensors" for rank in range(ranks)],
            size=size + 4096,
            section=np.zeros(ranks, np.int64),
            rank=np.arange(ranks),
            kind=["tensors"] * ranks,
            head_length=np.full(ranks, 4096),
            head_checksum=checksum_column(bytes(16 * ranks)),
            chunk_size=np.full(ranks, _CHUNK),
            codec=["raw"] * ranks,
        ),
        tensors=tensors,
        scope=np.full(len(names), -1),
        shards=shards,
        shard_file=np.tile(np.arange(ranks), len(names)),
        shard_offset=(np.cumsum(offset, 0) - offset).reshape(-1),
        checksums=empty_checksums(int((-(-nbytes // _CHUNK)).sum())),
    ).in_order()
    manifest.save_times = SaveTimes(seconds, stall, times).to_document()
    return manifest


def make_traces(directory: Path, *, ranks: int) -> None:
    """Write the trace of a save and a load for each rank."""
    directory.mkdir(parents=True)
    for rank, lines in enumerate(_traces(ranks)):
        (directory / f"rank-{rank:05d}-{1000 + rank}.json").write_text("[" + ",\n".join(lines) + ",\n")


def _traces(ranks: int) -> Iterator[list[str]]:
    saved = _times(ranks, 0)
    random = np.random.default_rng(1)
    loaded = {step: mean * random.lognormal(0, 0.1, ranks) for step, mean in _LOAD.items()}
    loaded["read"][ranks // 5] *= 2
    for rank in range(ranks):
        save = {**{step: float(one[rank]) for step, one in saved.items()}, **_AFTER}
        save["confirm"] += float(saved["write"].max() - saved["write"][rank])  # until the slowest rank has written
        load = {step: float(one[rank]) for step, one in loaded.items()}
        host = f"rank {rank} on node-{rank // 8:03d}"
        process = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": host}}
        events: list[dict[str, Any]] = [process]
        at = 1.7e9 + float(random.uniform(0, 0.01))
        for kind, steps in (("save", save), ("load", load)):
            for step, took in steps.items():
                arguments: dict[str, Any] = {"checkpoint": "/runs/7b/step-6000"}
                names = [f"{kind}.{step}"]
                if step in ("stage", "write", "read"):
                    arguments |= {"bytes": 3_000_000_000 if ranks < 64 else 400_000_000}
                if step == "read":
                    names.append("read" if rank < ranks // 8 else "read tier")  # the first hosts are new ones
                for name in names:
                    event = {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": 0, "args": arguments}
                    events.append({**event, "ts": round(at * 1e6, 1), "dur": round(took * 1e6, 1)})
                at += took
            at += 30
        yield [json.dumps(event) for event in events]


def make_page(folder: Path, *, ranks: int, checkpoints: int) -> Path:
    """Simulate a job in an empty folder, and return its report."""
    make_root(folder / "runs" / "7b", ranks=ranks, checkpoints=checkpoints)
    make_traces(folder / "traces", ranks=ranks)
    with contextlib.chdir(folder):
        cli.main(["report", "runs/7b", "traces"], standalone_mode=False)
    return folder / "report.html"


_VIEWS = (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False), ("phone-dark", 390, True))


_SHOW_SAVE = """(() => {
    const one = document.getElementById("operation");
    one.value = 1;
    one.dispatchEvent(new Event("change"));
    document.getElementById("operations").scrollIntoView();
    return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
})()"""


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--documentation", type=click.Path(file_okay=False, path_type=Path), help="Where its images go.")
def main(folder: Path, documentation: Path | None) -> None:
    """Write reports of 8 and of 4,096 ranks into FOLDER, which must be new, and images of them."""
    with Browser() as browser:
        for ranks, checkpoints in ((8, 12), (4096, 6)):
            page = make_page(folder / str(ranks), ranks=ranks, checkpoints=checkpoints)
            click.echo(f"{page}: {page.stat().st_size / 1e6:.2f} MB")
            for name, width, is_dark in _VIEWS:
                browser.show(width=width, height=900, is_dark=is_dark)
                browser.open(page, READY)
                browser.screenshot(folder / f"{ranks}-{name}.png", is_whole=True)
            if documentation is None:
                continue
            for scheme in ("light", "dark"):
                browser.show(width=1100, height=820, is_dark=scheme == "dark")
                browser.open(page, READY)
                if ranks > 8:
                    browser.evaluate(_SHOW_SAVE)
                browser.screenshot(documentation / f"report-{ranks}-{scheme}.webp")


if __name__ == "__main__":
    main()
