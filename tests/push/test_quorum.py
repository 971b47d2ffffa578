"""Pushes of which some engines are dead, and engines that come and go between pushes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import DeadlineError, EngineError, UsageError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(3, of=__name__)

_ABSENT = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def shared() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.fixture
def engine(shared: ToyEngine) -> ToyEngine:
    """Serves version 1."""
    with Pusher(HttpEngine(shared.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(1), version=1)
    return shared


def _pusher(*urls: str, quorum: int | None = None) -> Pusher:
    return Pusher([HttpEngine(url) for url in urls], deadline_s=time_limit(30), quorum=quorum)


def _assert_serves(engine: ToyEngine, version: int) -> None:
    digests = engine.look()["digests"]
    assert digests == expected_digests(version, len(digests))
    assert not engine.paused


def test_a_dead_engine_is_left_out_until_it_is_back(engine: ToyEngine) -> None:
    with _pusher(engine.url, _ABSENT, quorum=1) as pusher:
        report = pusher.push(ToyTrainee(2), version=2)
        assert list(report.failed) == [_ABSENT]
        assert "cannot be reached" in report.failed[_ABSENT]
        _assert_serves(engine, 2)
        assert [len(of_engine) for of_engine in pusher.state()] == [2, 0]
        with toy_engine(1) as back:
            pusher.set_engines([HttpEngine(engine.url), HttpEngine(back.url)])
            assert not pusher.push(ToyTrainee(3), version=3).failed
            _assert_serves(back, 3)
        assert list(pusher.push(ToyTrainee(4), version=4).failed) == [back.url]
        pusher.set_engines([HttpEngine(engine.url)])
        assert not pusher.push(ToyTrainee(5), version=5).failed
    _assert_serves(engine, 5)


@pytest.mark.parametrize("quorum", [None, 2])
def test_too_few_engines(engine: ToyEngine, quorum: int | None) -> None:
    with _pusher(engine.url, _ABSENT, quorum=quorum) as pusher:
        with pytest.raises(EngineError, match="is the engine up") as raised:
            pusher.push(ToyTrainee(2), version=2)
    assert raised.value.engine == _ABSENT
    _assert_serves(engine, 1)


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 40_000, "chunk_bytes": 4000}], ids=["arenas", "streamed"])
def test_an_engine_that_fails_while_it_loads(engine: ToyEngine, options: dict[str, int]) -> None:
    with toy_engine(2) as other:
        with _pusher(other.url) as first:
            first.push(ToyTrainee(1), version=1)
        engines = [HttpEngine(engine.url), HttpEngine(other.url)]
        other.fault(0, "fail", 1)
        with Pusher(engines, deadline_s=time_limit(30), quorum=1, **options) as pusher:
            if options:  # its senders notice that it has ended its stream
                with pytest.raises(EngineError, match="the layer does not fit"):
                    pusher.push(ToyTrainee(2), version=2)
            else:
                report = pusher.push(ToyTrainee(2), version=2)
                assert "the layer does not fit" in report.failed[other.url]
                _assert_serves(engine, 2)
                _assert_serves(other, 1)
            assert not pusher.push(ToyTrainee(3), version=3).failed
        _assert_serves(engine, 3)
        _assert_serves(other, 3)


def test_a_stopped_engine_is_left_out(engine: ToyEngine) -> None:
    with toy_engine(1) as other:
        stopped = other.look()["pids"][0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            with Pusher([HttpEngine(engine.url), HttpEngine(other.url)], deadline_s=time_limit(5), quorum=1) as pusher:
                assert "did not answer" in pusher.push(ToyTrainee(2), version=2).failed[other.url]
        finally:
            os.kill(stopped, signal.SIGCONT)
    _assert_serves(engine, 2)


def _engine_of_error(rank: int, world_size: int, urls: list[str]) -> str:
    with _pusher(*urls) as pusher:
        try:
            pusher.push(ToyTrainee(2), version=2)
        except (EngineError, DeadlineError) as error:
            return error.engine
    return ""


def test_every_rank_has_the_engine_of_an_error(engine: ToyEngine) -> None:
    with RankPool(2) as pool:
        assert pool.run(_engine_of_error, [engine.url, "http://nowhere.invalid:9"]) == ["http://nowhere.invalid:9"] * 2


def test_a_quorum_of_none() -> None:
    with pytest.raises(UsageError, match="quorum is a number of engines, not 0"):
        Pusher(quorum=0)


def test_the_command(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(6)}, step=6)
    command = ["push", str(tmp_path / "c"), "--to", engine.url, "--to", _ABSENT]
    assert CliRunner().invoke(cli, command).exit_code == 6
    done = CliRunner().invoke(cli, [*command, "--quorum", "1"])
    assert done.exit_code == 0, done.output
    assert f"{_ABSENT} was left out" in done.stderr
    _assert_serves(engine, 6)
