"""Progress reports of a running push."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from join_probes import giving
from rich.console import Console
from rich.progress import Progress as RichProgress
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.cli.output import _StageBar
from bytecheckpoint.inference.push import HttpEngine, Pusher, writing
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(3, of=__name__)

RING = {"memory_bytes": 20_000, "chunk_bytes": 4096}
Reports = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


def _push(rank: int, world_size: int, url: str, options: dict[str, Any]) -> tuple[Reports, Reports, list[int]]:
    """Return the progress reports of two pushes, and the bytes that each rank wrote in the first."""
    first: Reports = []
    second: Reports = []
    every_chunk = mock.patch.object(writing, "_RUN_BYTES", 1)  # progress is reported after each run of chunks
    with every_chunk, Pusher(HttpEngine(url), deadline_s=time_limit(30), **options) as pusher:
        report = pusher.push(ToyTrainee(1), version=1, progress=lambda *one: first.append(one))
        pusher.push(ToyTrainee(1), version=2, progress=lambda *one: second.append(one))
    return first, second, report.written


def _bytes(reports: Reports, stage: str) -> list[tuple[int, int]]:
    return [(done, total) for name, done, total in reports if name == stage]


@pytest.mark.parametrize("options", [{}, RING, {**RING, "group": "gloo"}], ids=["double", "streamed", "group"])
def test_each_rank_reports_its_own_bytes(engine: ToyEngine, options: dict[str, Any]) -> None:
    stages = [
        "describe",
        "plan",
        "prepare",
        *(["stream"] if "memory_bytes" in options else ["write", "verify", "apply"]),
    ]
    with RankPool(2) as pool:
        found = pool.run(_push, engine.url, options)
    for rank, (first, second, written) in enumerate(found):
        for reports in (first, second):
            assert list(dict.fromkeys(stage for stage, _, _ in reports)) == stages
            begin, *moved = _bytes(reports, stages[3])
            assert begin == (0, 0)
            assert [done for done, _ in moved] == sorted({done for done, _ in moved})
            assert moved[0][0] == 0
            assert {total for _, total in moved} == {moved[-1][0]}
            if "group" not in options:  # there, pieces go to one each
                assert moved[-1] == (written[rank], written[rank])
        assert len(_bytes(first, stages[3])) > 5


def test_progress_of_a_join(engine: ToyEngine) -> None:
    _push(0, 1, engine.url, {})
    reports: Reports = []
    with (
        toy_engine(1) as other,
        Pusher(HttpEngine(other.url), deadline_s=time_limit(30), tcp_only=True) as pusher,
        giving(engine) as begun,
    ):
        with ThreadPoolExecutor(1) as threads:
            join = threads.submit(pusher.push, HttpEngine(engine.url), progress=lambda *one: reports.append(one))
            begun(join)
            for worker in (0, 1):
                engine.fault(worker, "go on")
            report = join.result()
        assert other.look()["digests"] == expected_digests(1, 1)
    wrote = _bytes(reports, "write")
    assert wrote[1] == (0, sum(report.written))
    assert wrote[-1] == (sum(report.written), sum(report.written))


def test_a_progress_function_that_raises_is_not_called_again(
    engine: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        reports.append(stage)
        raise ValueError("the screen is full")

    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(3), version=3, progress=progress)
    assert engine.look()["digests"] == expected_digests(3, 2)
    assert reports == ["describe"]
    assert "the screen is full" in caplog.text


def test_a_new_stage_starts_at_zero_bytes() -> None:
    with RichProgress(console=Console(file=StringIO())) as bars:
        report = _StageBar(bars)
        seen = []
        for reports in (("write", 0, 0), ("write", 0, 10), ("write", 7, 10), ("apply", 0, 0)):
            report(*reports)
            (task,) = bars.tasks
            seen.append((task.description, task.completed, task.total))
    assert seen == [("write", 0, None), ("write", 0, 10), ("write", 7, 10), ("apply", 0, None)]


def test_progress_on_a_terminal(engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(4)}, step=4)
    push = ["push", str(tmp_path / "c"), "--to", engine.url]
    assert CliRunner().invoke(cli, push).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = CliRunner().invoke(cli, push)
    assert done.exit_code == 0
    assert "apply" in done.stderr
    assert "the engines serve version 4" in done.stdout
