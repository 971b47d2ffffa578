"""What ``bcp report`` finds in a root and in traces. ``test_report_page.py`` opens the page."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.cli import report, report_data
from bytecheckpoint.cli.report_data import TimedOperation
from bytecheckpoint.cli.report_traces import trace_operations
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.telemetry import TraceFiles, merge_traces
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

_ECHARTS = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"


def _state() -> dict[str, Any]:
    return {"model": {"large": torch.ones(4096, 8), "small": torch.ones(3)}, "extra_state": {"step": 1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints, of which one lacks a file and one shares bytes with another, and a failed save."""
    root = tmp_path_factory.mktemp("report") / "<b>runs"
    for step in (1, 2):
        bcp.save(root / f"step-{step}", _state(), step=step)
    for step in (3, 4):
        bcp.save(root / f"step-{step}", _state(), step=step, options=bcp.SaveOptions(base="auto"))
    next((root / "step-2").glob("*/model-00000.safetensors")).unlink()
    begun = root / "step-5" / "attempt-20260101T000000Z-0123456789abcdef" / "model-00000.safetensors"
    begun.parent.mkdir(parents=True)
    begun.touch()
    return root


def test_the_checkpoints_of_a_root(root: Path, bcp_command: Callable[..., Any]) -> None:
    found = bcp_command("report", root, "--json").json
    rows = {one["name"]: one for one in found["checkpoints"]}
    assert list(rows) == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    assert re.fullmatch(
        r"1 file\(s\) missing or truncated: attempt-.*/model-00000.safetensors", rows["step-2"]["problem"]
    )
    assert rows["step-5"]["problem"] == "1 save(s) began and none was committed"
    assert [name for name, one in rows.items() if one["newest"]] == ["step-4"]
    for name in ("step-1", "step-3", "step-4"):
        assert rows[name]["problem"] == ""
        assert rows[name]["stall"] == rows[name]["seconds"] > 0, "a synchronous save waits for all of it"
    assert rows["step-1"]["shared_bytes"] == rows["step-3"]["shared_bytes"] == 0
    assert rows["step-4"]["shared_bytes"] == 4096 * 8 * 4 + 3 * 4
    assert rows["step-4"]["bytes"] < rows["step-1"]["bytes"]
    assert found["uploads_waiting"] == []


def test_the_saves_of_a_root_and_the_layout_of_the_newest(root: Path, bcp_command: Callable[..., Any]) -> None:
    found = bcp_command("report", root, "--json").json
    assert [one["name"] for one in found["operations"]] == ["step-4", "step-3", "step-2", "step-1"]
    save = found["operations"][-1]
    assert list(save["seconds"]) == ["check", "describe", "agree", "plan", "stage", "write"]
    assert save["begin"] == {}
    stored = sum(path.stat().st_size for path in (root / "step-1").glob("attempt-*/*"))
    assert save["bytes"] == {"write": [stored]}
    layout = found["layout"]
    assert (layout["checkpoint"], layout["left_out"]) == ("step-4", 0)
    assert [(one["name"], one["shape"], one["boxes"]) for one in layout["tensors"]] == [
        ("model.large", [4096, 8], 1),
        ("model.small", [3], 1),
    ]
    assert (layout["offsets"], layout["lengths"], layout["file_ranks"]) == ([0, 0, 0], [4096, 8, 3], [0])


def test_one_checkpoint_instead_of_a_root(root: Path, bcp_command: Callable[..., Any]) -> None:
    found = bcp_command("report", root / "step-1", "--json").json
    assert [one["name"] for one in found["checkpoints"]] == [found["layout"]["checkpoint"]] == ["."]


def test_large_layouts_keep_the_largest_tensors(
    root: Path, bcp_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_data, "_MOST_BOXES", 1)
    layout = bcp_command("report", root, "--json").json["layout"]
    assert ([one["name"] for one in layout["tensors"]], layout["left_out"]) == (["model.large"], 1)


def test_old_operations_are_left_out_if_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [TimedOperation("save", str(at), 4, {"write": np.ones(4)}) for at in range(5)]
    monkeypatch.setattr(report, "_MOST_NUMBERS", 8)
    assert [one.name for one in report._newest(operations)] == ["4", "3"]
    monkeypatch.setattr(report, "_MOST_NUMBERS", 1)
    assert [one.name for one in report._newest(operations)] == ["4"], "the newest, however large"


def test_the_slowest_ranks_are_those_for_which_others_wait() -> None:
    write = np.full(100, 2.0)
    write[[7, 42]] = 10.0, 5.0
    stage = np.full(100, 1.0)
    stage[3], stage[4] = 1.05, np.nan
    check = np.full(100, 0.001)
    check[5] = 0.01
    agree = np.full(100, 0.1)
    agree[50] = 30.0
    seconds = {"check": check, "agree": agree, "stage": stage, "write": write, "confirm": 10 - write}
    save = TimedOperation("save", "a", 100, seconds, hosts={7: "node-1"})
    found = save.to_document()
    assert found["slowest"] == [
        {"rank": 7, "host": "node-1", "step": "write", "seconds": 10.0, "median": 2.0},
        {"rank": 42, "host": "", "step": "write", "seconds": 5.0, "median": 2.0},
    ]
    assert found["waits"] == ["agree", "confirm"]
    assert found["seconds"]["stage"][4] is None


def _traced(rank: int, world_size: int, folder: str, directory: str) -> None:
    state = {"model": {f"w{rank}": torch.ones(1000)}}
    with TraceFiles(directory):
        for _ in range(2):
            bcp.save(folder, state)
        bcp.load(folder, state)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    """The traces of two ranks, which have saved twice to one path and loaded once."""
    folder = tmp_path_factory.mktemp("traced")
    rank_pool.run(_traced, str(folder / "step-1"), str(folder / "traces"), world_size=2)
    return folder / "traces"


def test_saves_and_loads_in_traces(traces: Path, tmp_path: Path, bcp_command: Callable[..., Any]) -> None:
    found = bcp_command("report", traces, "--json").json
    assert (found["root"], found["checkpoints"], found["layout"]) == (None, [], None)
    operations = found["operations"]
    names = [("load", "step-1"), ("save", "step-1 (2)"), ("save", "step-1")]
    assert [(one["kind"], one["name"]) for one in operations] == names
    for one in operations:
        assert one["ranks"] == 2
        assert one["hosts"] == [os.uname().nodename] * 2
        assert min(min(column) for column in one["begin"].values()) == 0
        for step, column in one["seconds"].items():
            assert all(value is not None and value >= 0 for value in column), step
    assert list(operations[0]["sources"]) == ["store"]
    assert all(nbytes >= 4000 for nbytes in operations[0]["sources"]["store"])
    assert operations[1]["sources"] == {}
    assert list(operations[1]["seconds"])[-3:] == ["confirm", "commit", "clean"]
    assert all(nbytes >= 4000 for nbytes in operations[1]["bytes"]["write"])
    both = bcp_command("report", traces.parent, traces, "--json").json
    assert len(both["checkpoints"]) == 1
    assert both["operations"] == operations, "the save in the manifest is in the traces, too"
    merged = tmp_path / "merged.json"
    merge_traces(sorted(traces.glob("rank-*.json")), merged)
    again = bcp_command("report", merged, "--json").json["operations"]
    for one, other in zip(operations, again, strict=True):
        begin = one.pop("begin")
        for step, column in other.pop("begin").items():
            assert column == pytest.approx(begin[step], abs=2e-5), "times of a merged trace are rounded twice"
    assert again == operations


def _resumed(rank: int, world_size: int, folder: str, directory: str) -> None:
    """Rank 1 is on a machine without a tier. Both ranks load a shared tensor, and each its own."""
    state = {"model": {"shared": torch.ones(1 << 20)}, "own": {f"w{rank}": torch.ones(1 << 20)}}
    saved, loaded = (
        bcp.Location(f"{folder}/store", tier=bcp.Tier(f"{folder}/{tier}")).join("step-1")
        for tier in (f"tier-{rank}", "empty" if rank == 1 else f"tier-{rank}")
    )
    bcp.save(saved, state).uploaded()
    with TraceFiles(directory):
        bcp.load(loaded, state, options=bcp.LoadOptions(share_reads="always"))


def test_the_sources_of_a_resume(rank_pool: RankPool, tmp_path: Path, bcp_command: Callable[..., Any]) -> None:
    rank_pool.run(_resumed, str(tmp_path), str(tmp_path / "traces"), world_size=2)
    page = tmp_path / "report.html"
    found = bcp_command("report", tmp_path / "traces", "--json", "--output", page).json
    [load] = found["operations"]
    sources = load["sources"]
    assert list(sources) == ["other ranks", "store", "tier"]
    assert sources["store"][1] >= 4 << 20, "its own tensor"
    assert sources["tier"][1] == 0
    assert sources["tier"][0] >= 4 << 20
    assert sum(sources["other ranks"]) == 4 << 20, "each rank reads a half of the shared tensor"
    [moved] = load["moved"]
    assert moved["step"] == "read"
    assert 12 << 20 <= moved["bytes"] < 13 << 20
    text = page.read_text(encoding="utf-8")
    assert "<td>other ranks</td><td class=n>4.0 MiB</td>" in text


def test_a_floor_is_measured_below_the_root(
    root: Path, traces: Path, tmp_path: Path, bcp_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bcp_command("report", root, "--json").json["floor"] is None
    monkeypatch.setattr(report_data, "_FLOOR_PIECE", 1 << 20)
    monkeypatch.setattr(report_data, "_FLOOR_BYTES", 20 << 20)
    before = sorted(root.rglob("*"))
    page = tmp_path / "page.html"
    found = bcp_command("report", root, "--floor", "--json", "--output", page).json
    assert sorted(found["floor"]) == ["read", "write"]
    assert min(found["floor"].values()) > 0
    assert sorted(root.rglob("*")) == before
    [save] = [one for one in found["operations"] if one["name"] == "step-1"]
    [moved] = save["moved"]
    share = moved["bytes"] / moved["seconds"] / found["floor"]["write"]
    text = page.read_text(encoding="utf-8")
    assert f"<td class=n>{share:.0%}</td>" in text
    assert "This machine writes" in text
    assert bcp_command("report", traces, "--floor").code == 2


_KILLED = """
import os, signal, sys
from bytecheckpoint.cli import report_data
from bytecheckpoint.storage_backends import open_backend
report_data._FLOOR_PIECE, report_data._FLOOR_BYTES = 1 << 20, 4 << 20
os.fdatasync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
report_data.measure_floor(open_backend(sys.argv[1]))
"""


def test_the_file_of_a_floor_whose_command_is_killed_can_be_removed(
    tmp_path: Path, bcp_command: Callable[..., Any]
) -> None:
    done = warm_python().run(["-c", _KILLED, str(tmp_path)], timeout=time_limit(120))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(open_backend(tmp_path).list())
    assert bcp_command("clean", tmp_path, "--yes", "--older-than", 0).code == 0
    assert list(open_backend(tmp_path).list()) == []


@pytest.mark.parametrize("url", ["memory://floors", "missing"])
def test_floors_of_any_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "_FLOOR_PIECE", 1 << 10)
    monkeypatch.setattr(report_data, "_FLOOR_BYTES", 10 << 10)
    backend = open_backend(url if "://" in url else tmp_path / url)
    assert min(report_data.measure_floor(backend).values()) > 0
    assert list(backend.list()) == []


def test_a_rank_that_was_killed_has_no_later_steps(traces: Path, tmp_path: Path) -> None:
    first, second = sorted(traces.glob("rank-*.json"))
    shutil.copy(first, tmp_path)
    lines = second.read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if '"save.write"' in line)
    (tmp_path / second.name).write_text("\n".join(lines[:at]) + lines[at][:20])
    save = trace_operations(sorted(tmp_path.glob("*.json")))[0]
    assert not np.isnan(save.seconds["write"][0])
    assert np.isnan(save.seconds["write"][1])
    assert save.to_document()["seconds"]["write"][1] is None


def test_a_job_that_was_restarted_repeats_a_save(tmp_path: Path) -> None:
    """Two tries were killed, and each left another file of the same rank."""
    for process, steps in enumerate((["check", "stage"], ["check"], ["check", "stage", "write"])):
        with (tmp_path / f"rank-00000-{process}.json").open("w") as file:
            file.write("[")
            for at, step in enumerate(steps):
                event = {"cat": "save", "ph": "X", "name": f"save.{step}", "pid": 0, "dur": 1, "ts": process * 100 + at}
                file.write(json.dumps({**event, "args": {"checkpoint": "runs/step-1"}}) + ",\n")
    found = trace_operations(sorted(tmp_path.glob("*.json")))
    tries = {"step-1": ["check", "stage"], "step-1 (2)": ["check"], "step-1 (3)": ["check", "stage", "write"]}
    assert {one.name: [*one.seconds] for one in found} == tries


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "cat": "save", "name": "save.write", "pid": 0, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "save", "name": "save.write", "pid": 10**9, "ts": 1, "dur": 1, "args": {"checkpoint": "a"}},
        {"ph": "X", "cat": "save", "name": "save.write", "pid": 0, "ts": "x", "dur": 1, "args": {"checkpoint": "a"}},
        {"ph": "X", "cat": "save", "name": 3, "pid": 0, "ts": 1, "dur": 1, "args": {"checkpoint": "a"}},
    ],
)
def test_traces_of_other_programs_are_refused(
    tmp_path: Path, bcp_command: Callable[..., Any], event: dict[str, Any]
) -> None:
    trace = tmp_path / "trace.json"
    for text in (f"[{json.dumps(event)},\n", json.dumps({"traceEvents": [event]})):
        trace.write_text(text)
        done = bcp_command("report", trace, "--json")
        assert done.code == 2
        assert "is not a trace of this library" in done.stderr


def test_the_page_is_one_file_and_escapes_names(root: Path, tmp_path: Path, bcp_command: Callable[..., Any]) -> None:
    page = tmp_path / "page.html"
    done = bcp_command("report", root, "--output", page)
    assert done.code == 0
    assert done.stdout == f"{page}: 5 checkpoint(s), 4 save(s) and load(s); open it in a browser\n"
    text = page.read_text(encoding="utf-8")
    own = text.replace(files("bytecheckpoint.cli").joinpath("page", "echarts.min.js").read_text(encoding="utf-8"), "")
    assert "&lt;b&gt;runs" in own
    assert "<b>" not in own
    assert "default-src 'none'" in own
    assert not re.search(r"<(link|img|iframe|object|base)\b|\bsrc=|\bhref=|@import|url\(|https?:", own)
    for name in ("step-1", "step-5", "1 save(s) began and none was committed", "complete, newest"):
        assert name in own, "the table needs no scripts"


def test_options(
    root: Path, traces: Path, tmp_path: Path, bcp_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bcp_command("report", root, "--json").code == 0
    assert os.listdir() == []
    assert bcp_command("report", root, traces).code == 0
    assert os.listdir() == ["report.html"]
    assert bcp_command("report", root, root).code == 2
    assert bcp_command("report", root, "--output", tmp_path / "missing" / "report.html").code == 5
    for number, content in enumerate((b"\xff\xfe", b"{}", b"[1\n2\n")):
        trace = tmp_path / str(number)
        trace.write_bytes(content)
        done = bcp_command("report", trace)
        assert done.code == 2
        assert done.stderr.count(str(trace)) == 1, "one message"
    assert bcp_command("report", tmp_path / "missing").code == 3


def test_the_vendored_library_is_the_published_one() -> None:
    folder = files("bytecheckpoint.cli").joinpath("page")
    data = folder.joinpath("echarts.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == _ECHARTS, "dist/echarts.min.js of the npm package echarts 6.1.0"
    licence = folder.joinpath("echarts.LICENSE.txt").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "The Apache Software Foundation" in licence
