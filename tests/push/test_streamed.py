"""Pushes to workers with little host memory: one arena, or a ring buffer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from join_probes import arenas, held_by, until, wait_until_it_holds_at_most
from leak_watch import held_now, left_since
from streams import RING, fail, push_and_look, same
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import CorruptionError, DeadlineError, EngineError, RankFailedError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.memory import DOUBLE, STREAMED, choose_mode
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(9, of=__name__)

DEVICE = {**RING, "cuda_ipc": True}

STREAMS = pytest.mark.parametrize("options", [RING, DEVICE], ids=["host", "device"])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2, devices=["host", "host"]) as started:
        yield started


@pytest.mark.parametrize("tcp", [False, True])
@STREAMS
@pytest.mark.sampled(2)
def test_ten_updates_in_a_row(engine: ToyEngine, pool: RankPool, options: dict[str, Any], tcp: bool) -> None:
    first, *_ = pool.run(push_and_look, [engine.url], list(range(1, 11)), {**options, "tcp_only": tcp})
    assert [digests for _, (digests,) in first] == [expected_digests(version, 2) for version in range(1, 11)]
    assert {report.mode for report, _ in first} == {STREAMED}
    assert not engine.paused
    with Pusher(HttpEngine(engine.url)) as pusher:
        for one in pusher.state()[0]:
            assert one["version"] == 10
            assert one["bytes"] <= options["memory_bytes"]
            assert not one["intact"]


def test_changing_the_memory_mode(engine: ToyEngine) -> None:
    whole = {"memory_bytes": 1 << 30}
    modes = [(whole, DOUBLE), (RING, STREAMED), (DEVICE, STREAMED)]
    for version, (options, mode) in enumerate([modes[number] for number in (0, 0, 1, 2, 1, 0, 2, 0)], 20):
        ((report, (digests,)),) = push_and_look(0, 1, [engine.url], [version], options)
        assert (report.mode, digests) == (mode, expected_digests(version, 2))


@STREAMS
def test_resources_do_not_grow(engine: ToyEngine, options: dict[str, Any]) -> None:
    push_and_look(0, 1, [engine.url], [31, 32], options)
    engine_before, before = held_by(engine), held_now()
    for version in (33, 34, 35):
        push_and_look(0, 1, [engine.url], [version], options)
    assert left_since(before, turns=3) == []
    wait_until_it_holds_at_most(engine, engine_before)


@pytest.mark.parametrize("options", [{}, RING, DEVICE, {**RING, "group": "gloo"}], ids=str)
def test_in_inference_mode(engine: ToyEngine, options: dict[str, Any]) -> None:
    with torch.inference_mode():
        ((_, (digests,)),) = push_and_look(0, 1, [engine.url], [36], options)
    assert digests == expected_digests(36, 2)


def test_free_memory_decides_the_mode() -> None:
    assert choose_mode(100, 200, 0, 8) == DOUBLE
    assert choose_mode(100, 199, 0, 8) == STREAMED
    assert choose_mode(1 << 60, None, 0, 1) == STREAMED
    assert choose_mode(1 << 60, None, 2 << 60, 1) == DOUBLE  # already held
    assert choose_mode(1 << 20, None, 0, 1) == DOUBLE
    assert choose_mode(1 << 20, None, 0, 1 << 40) == STREAMED


def _push(engine: ToyEngine, version: int, options: dict[str, Any] = RING) -> None:
    push_and_look(0, 1, [engine.url], [version], options)
    assert engine.look()["digests"] == expected_digests(version, 2)
    assert not engine.paused
    assert arenas(engine) == [0, 0]  # no earlier failure keeps a ring buffer


@STREAMS
def test_a_damaged_chunk(engine: ToyEngine, pool: RankPool, options: dict[str, Any]) -> None:
    _push(engine, 1, options)
    message = same(pool.run(fail, engine.url, "damage", options), CorruptionError)
    assert "did not arrive as it was sent" in message
    assert "the bytes of version 1 were not kept" in message
    assert "is left paused; push again, or restart it" in message
    assert engine.paused
    until(lambda: arenas(engine) == engine.look()["arenas"] == [0, 0], "the ring is given back")
    _push(engine, 3, options)


@STREAMS
def test_a_sender_killed_while_it_writes(engine: ToyEngine, options: dict[str, Any]) -> None:
    _push(engine, 1, options)
    with RankPool(2) as pool:
        (survivor, _) = pool.run(fail, engine.url, "SIGKILL", options, expect_death={1: signal.SIGKILL})
    assert survivor[0] == RankFailedError.__name__
    assert "rank 1" in survivor[1]
    assert "is left paused; push again, or restart it" in survivor[1]
    assert engine.paused
    _push(engine, 3, options)


@STREAMS
@pytest.mark.sampled(1)
def test_a_sender_stopped_while_it_writes(engine: ToyEngine, options: dict[str, Any]) -> None:
    _push(engine, 1, options)
    with RankPool(2) as pool:
        (survivor, _) = pool.run(fail, engine.url, "SIGSTOP", options, 4.0, expect_death={1: signal.SIGKILL})
    assert survivor[0] == DeadlineError.__name__
    assert f"no sender wrote anything for {0.56 * time_limit(4):g} s" in survivor[1]
    assert "is left paused; push again, or restart it" in survivor[1]
    _push(engine, 3, options)


@STREAMS
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_fails_half_way(engine: ToyEngine, pool: RankPool, options: dict[str, Any], worker: int) -> None:
    _push(engine, 1, options)
    engine.fault(worker, "fail", 1)
    message = same(pool.run(fail, engine.url, "", options), EngineError)
    assert f"worker {worker} of" in message
    assert "the layer does not fit" in message
    assert "is left paused; push again, or restart it" in message
    assert engine.paused
    _push(engine, 3, options)


def test_the_first_push_rolls_back_to_what_the_engine_started_with(pool: RankPool) -> None:
    with toy_engine(2) as engine:
        for worker in (0, 1):
            engine.fault(worker, "can_restore")
        engine.fault(1, "fail", 1)
        message = same(pool.run(fail, engine.url, "", RING), EngineError)
        assert "serves what it started with" in message
        assert engine.look()["digests"] == expected_digests(0, 2)
        assert not engine.paused
        _push(engine, 3)


def test_an_engine_that_cannot_roll_back_stays_paused_when_another_fails(engine: ToyEngine, tmp_path: Path) -> None:
    gate = tmp_path / "the first has it whole"
    os.mkfifo(gate)
    with toy_engine(2) as other, gate.open("rb+", buffering=0) as opened:
        _push(engine, 1)
        _push(other, 1)
        other.fault(0, "fail after", str(gate))
        engines = [HttpEngine(engine.url), HttpEngine(other.url)]
        with Pusher(engines, deadline_s=time_limit(30), **RING) as pusher, ThreadPoolExecutor(1) as thread:
            push = thread.submit(pusher.push, ToyTrainee(2), version=2)
            until(lambda: engine.look()["digests"] == expected_digests(2, 2), "the first has it whole")
            opened.write(b"!")
            with pytest.raises(EngineError, match="the layer does not fit") as raised:
                push.result()
            left = f"{engine.url} has version 2 and cannot return to the one before, so it is left paused"
            assert left in str(raised.value)
            assert f"`bcp push --resume {engine.url}` or the next push resumes it" in str(raised.value)
            assert engine.paused
            assert other.paused
            with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as own:
                assert own.resume() == [2]
            assert engine.look()["digests"] == expected_digests(2, 2)
            assert not engine.paused
            pusher.push(ToyTrainee(3), version=3)
        for one in (engine, other):
            assert one.look()["digests"] == expected_digests(3, 2)
            assert not one.paused


@STREAMS
@pytest.mark.sampled(1)
def test_a_worker_stopped_while_it_loads(engine: ToyEngine, pool: RankPool, options: dict[str, Any]) -> None:
    _push(engine, 1, options)
    stopped = engine.look()["pids"][1]
    engine.fault(1, "stop in apply")
    try:
        message = same(pool.run(fail, engine.url, "", options, 4.0), DeadlineError)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # A sender, the other worker, or the coordinator notices it first.
    assert re.search(r"is its process stopped\?|is one of its workers stopped\?|no sender wrote anything", message)
    assert "left paused" in message
    assert "the next push resumes" in message
    _push(engine, 3, options)


@STREAMS
def test_a_worker_killed_while_it_loads(pool: RankPool, options: dict[str, Any]) -> None:
    with toy_engine(2, devices=["host", "host"]) as engine:
        _push(engine, 1, options)
        engine.fault(1, "die in apply")
        message = same(pool.run(fail, engine.url, "", options), EngineError)
        assert f"{engine.url} has ended: its server or one of its workers was killed or failed" in message


def test_a_failed_version_does_not_revert_an_earlier_one_of_the_same_name(engine: ToyEngine) -> None:
    """A worker that has not applied a version has nothing to revert, whatever the name of the version before."""
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(4), version=5)
        engine.fault(0, "fail", 1)
        with pytest.raises(EngineError, match="the layer does not fit"):
            pusher.push(ToyTrainee(6), version=5)
        assert engine.look()["digests"] == expected_digests(4, 2)
        assert all(one["intact"] for one in pusher.state()[0])
