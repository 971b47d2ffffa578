"""Test the telemetry of saves and loads: timings, log lines, and files for a trace viewer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import UsageError
from bytecheckpoint.telemetry import TraceFiles
from bytecheckpoint.telemetry.trace_files import merge_traces
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


def _state(rows: int = 64) -> dict[str, Any]:
    return {"model": {"weight": torch.arange(rows * 16.0).reshape(rows, 16)}, "extra_state": {"step": 3}}


def _save_and_load_traced(rank: int, world_size: int, folder: str, directory: str) -> str:
    with TraceFiles(directory):
        bcp.save(folder, _state())
        report = bcp.load(folder, _state())
    return str(report.timings)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_a_trace_of_all_ranks_in_one_file(pool: RankPool, tmp_path: Path) -> None:
    folder, directory = tmp_path / "checkpoint", tmp_path / "trace"
    pool.run(_save_and_load_traced, str(folder), str(directory))
    assert len(list(directory.glob("rank-*.json"))) == 2
    done = CliRunner().invoke(cli, ["trace", str(directory), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["ranks"] == 2

    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    for rank in (0, 1):
        names = {event["name"] for event in spans if event["pid"] == rank}
        assert {f"save.{step}" for step in telemetry.SAVE_STEPS if step not in ("clean", "merge")} <= names
        assert {f"load.{step}" for step in telemetry.LOAD_STEPS} <= names
    assert min(event["ts"] for event in spans) == 0.0
    assert all(event["dur"] >= 0 and event["args"]["checkpoint"].endswith("checkpoint") for event in spans)
    labels = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {label.split(" on ")[0] for label in labels} == {"rank 0", "rank 1"}


def test_the_file_of_a_killed_rank_is_readable(tmp_path: Path) -> None:
    with TraceFiles(tmp_path / "trace"):
        bcp.save(tmp_path / "checkpoint", _state())
    (path,) = (tmp_path / "trace").glob("rank-*.json")
    whole = merge_traces([path], tmp_path / "whole.json")
    path.write_text(path.read_text()[:-30])
    assert merge_traces([path], tmp_path / "cut.json") == whole - 1
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["not json", *lines]))
    with pytest.raises(UsageError, match="line 1"):
        merge_traces([path], tmp_path / "bad.json")


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    with TraceFiles(tmp_path / "trace"):
        pass
    bcp.save(tmp_path / "checkpoint", _state())
    assert not list((tmp_path / "trace").iterdir())


def test_an_environment_variable_traces_a_job(tmp_path: Path) -> None:
    job = f"import torch, bytecheckpoint as bcp\nbcp.save({str(tmp_path / 'c')!r}, {{'model': {{'w': torch.ones(3)}}}})"
    environment = {**os.environ, "BYTECHECKPOINT_TRACE": str(tmp_path / "trace")}
    warm_python().run(["-c", job], check=True, env=environment, timeout=time_limit(60))
    assert merge_traces(list((tmp_path / "trace").glob("rank-*.json")), tmp_path / "all.json") > 5


def test_the_command_reports_an_empty_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["trace", str(tmp_path)])
    assert done.exit_code == 2
    assert "BYTECHECKPOINT_TRACE" in done.output


def test_bytes_and_rates_are_on_handle_and_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = _state(4096)
    nbytes = state["model"]["weight"].nbytes
    with caplog.at_level(logging.DEBUG, logger="bytecheckpoint"):
        saved = bcp.save(tmp_path / "checkpoint", state).timings
        loaded = bcp.load(tmp_path / "checkpoint", state).timings
    assert saved.work["hash"].nbytes >= nbytes
    assert saved.work["write"].nbytes >= nbytes
    assert saved.work["copy"].nbytes >= nbytes
    assert loaded.work["read"].nbytes >= nbytes
    assert loaded.work["verify"].nbytes >= nbytes
    assert "GB/s" in str(saved)
    assert "GB/s" in str(loaded)
    assert any("save.write took" in message for message in caplog.messages)
    assert any("load.read took" in message for message in caplog.messages)


def test_an_unwritable_trace_does_not_fail_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "trace"
    with TraceFiles(directory):
        bcp.save(tmp_path / "a", _state())
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        bcp.save(tmp_path / "b", _state())
    assert bcp.open(tmp_path / "b").verify().ok
    assert len([message for message in caplog.messages if "has gaps" in message]) == 1
