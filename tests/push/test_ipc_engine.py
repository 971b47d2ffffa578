"""Pushes into engines that are set up for checkpoint-engine: real processes that run its worker function.

Needs checkpoint-engine, which is installed next to vLLM (see CONTRIBUTING).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bytecheckpoint.testing import time_limit

pytest.importorskip("checkpoint_engine")

from join_probes import held_by, wait_until_it_holds_at_most
from leak_watch import held_now, left_since
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine
from toy_ipc_engine import toy_ipc_engine

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import BytecheckpointError, DeadlineError, EngineError, StateError
from bytecheckpoint.inference.push import DraftEngine, HttpEngine, IpcEngine, Pusher
from bytecheckpoint.inference.push.memory import DOUBLE, STREAMED
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.vllm, pytest.mark.sampled(8, of=__name__)]

DEVICES = ["cpu-0", "cpu-1"]
BUCKET = 20_000  # bytes; one tensor has 65,536
WHOLE: dict[str, Any] = {}
RING = {"memory_bytes": 20_000, "chunk_bytes": 4096}  # of some 160,000
MODES = pytest.mark.parametrize(("options", "mode"), [(WHOLE, DOUBLE), (RING, STREAMED)], ids=[DOUBLE, STREAMED])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_ipc_engine(2) as started:
        yield started


def _ipc_engine(url: str, **options: Any) -> IpcEngine:
    return IpcEngine(url, devices=DEVICES, **{"bucket_bytes": BUCKET, **options})


def _pusher(url: str, **options: Any) -> Pusher:
    return Pusher(_ipc_engine(url), deadline_s=time_limit(30), **options)


def _assert_serves(engine: ToyEngine, version: int) -> None:
    assert engine.look()["digests"] == expected_digests(version, 2)
    assert not engine.paused


def _push_and_look(rank: int, world_size: int, url: str, versions: list[int], options: dict[str, Any]) -> list[Any]:
    found = []
    with Pusher(_ipc_engine(url) if rank == 0 else None, deadline_s=time_limit(30), **options) as pusher:
        for version in versions:
            report = pusher.push(fully_shard(ToyTrainee(version)), version=version)
            found.append((report, ToyEngine(url).look() if rank == 0 else {}))
    return found


@MODES
def test_ten_updates_in_a_row(engine: ToyEngine, pool: RankPool, options: dict[str, Any], mode: str) -> None:
    first, _ = pool.run(_push_and_look, engine.url, list(range(1, 11)), options)
    assert [seen["digests"] for _, seen in first] == [expected_digests(version, 2) for version in range(1, 11)]
    assert {report.mode for report, _ in first} == {mode}
    assert not engine.paused
    names = list(ToyTrainee(1).state_dict())
    for _, seen in first:
        for buckets in seen["buckets"]:  # of each worker
            assert len(buckets) == 3
            assert ["experts"] in buckets  # larger than a bucket should be
            assert sorted(name for bucket in buckets for name in bucket) == sorted(names)
        assert seen["memories"] == [0, 0]
    wait_until_it_holds_at_most(engine, {"descriptors": first[1][1]["descriptors"]})


def test_different_dtypes_in_the_job_and_the_engine() -> None:
    with toy_ipc_engine(2, "bfloat16") as engine, _pusher(engine.url) as pusher:
        for version, trainee in ((1, ToyTrainee(1)), (2, ToyTrainee(2).bfloat16())):
            pusher.push(trainee, version=version)
            assert engine.look()["digests"] == expected_digests(version, 2, torch.bfloat16)


def test_an_engine_without_the_path() -> None:
    with toy_ipc_engine(1, unknown=("/collective_rpc",)) as engine:
        with Pusher(IpcEngine(engine.url, devices=["cpu-0"]), deadline_s=time_limit(30)) as pusher:
            with pytest.raises(EngineError, match=r"cpu-0 of .* takes no part.*VLLM_SERVER_DEV_MODE=1"):
                pusher.push(ToyTrainee(1), version=1)


def test_devices_that_the_workers_do_not_have(engine: ToyEngine) -> None:
    with Pusher(IpcEngine(engine.url, devices=["cpu-7", "cpu-8"]), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(EngineError, match=r"cpu-7 of .* takes no part.*KeyError"):
            pusher.push(ToyTrainee(1), version=1)
    with _pusher(engine.url) as pusher:
        pusher.push(ToyTrainee(2), version=2)
    _assert_serves(engine, 2)


@pytest.mark.parametrize(("worker", "bucket"), [(0, 0), (1, 2), (1, -1)], ids=["first bucket", "third", "post hook"])
def test_a_worker_that_raises_and_the_rollback(engine: ToyEngine, bucket: int, worker: int) -> None:
    with _pusher(engine.url) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        engine.fault(worker, "raise", bucket)
        with pytest.raises(EngineError, match="the layer does not fit") as raised:
            pusher.push(ToyTrainee(2), version=2)
        what = "takes no part in the update" if bucket < 0 else "failed"
        assert f"the worker on cpu-{worker} of {engine.url} {what}:" in str(raised.value)
        assert f"): the worker on cpu-{worker}" in str(raised.value)  # the unchanged message, without a class name
        assert "serves version 1" in str(raised.value)
        _assert_serves(engine, 1)
        pusher.push(ToyTrainee(3), version=3)
        _assert_serves(engine, 3)


def test_workers_do_not_raise_in_an_engine_that_would_not_survive_it() -> None:
    with toy_ipc_engine(2, first_failure=True) as engine, _pusher(engine.url) as pusher:
        for version, worker in ((1, 0), (3, 1)):
            pusher.push(ToyTrainee(version), version=version)
            engine.fault(worker, "raise", 1)
            with pytest.raises(EngineError, match="the layer does not fit"):
                pusher.push(ToyTrainee(2), version=2)
            _assert_serves(engine, version)


def _fail(rank: int, world_size: int, url: str, options: dict[str, Any], deadline_s: float) -> tuple[str, str]:
    """Return the class and message of this rank's error."""
    with Pusher(_ipc_engine(url) if rank == 0 else None, deadline_s=time_limit(deadline_s), **options) as pusher:
        try:
            pusher.push(fully_shard(ToyTrainee(2)), version=2)
        except BytecheckpointError as error:
            return type(error).__name__, str(error)
    raise AssertionError("the push did not fail")


def _same(raised: list[Any], kind: type[Exception]) -> str:
    assert {name for name, _ in raised} == {kind.__name__}, raised
    assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
    return str(raised[0][1])


def test_a_worker_that_raises_in_a_stream(engine: ToyEngine, pool: RankPool) -> None:
    engine.fault(1, "raise", 2)
    message = _same(pool.run(_fail, engine.url, RING, 30.0), EngineError)
    assert "the worker on cpu-1 of" in message
    assert "the layer does not fit" in message
    assert "is left paused; push again, or restart it" in message
    assert engine.paused
    pool.run(_push_and_look, engine.url, [3], RING)
    _assert_serves(engine, 3)


def test_a_worker_killed_and_the_engine_started_again() -> None:
    with ExitStack() as stack:
        with toy_ipc_engine(2) as engine:
            pusher = stack.enter_context(_pusher(engine.url))
            pusher.push(ToyTrainee(1), version=1)
            other = engine.look()["pids"][0]
            engine.fault(1, "SIGKILL", 1)
            with pytest.raises(EngineError, match=r"the worker on cpu-1 of .* takes no part") as raised:
                pusher.push(ToyTrainee(2), version=2)
            assert "is left paused; push again, or restart it" in str(raised.value)
            assert "/memfd:bcp" not in Path(f"/proc/{other}/maps").read_text()
        with toy_ipc_engine(2, port=int(engine.url.rpartition(":")[2])) as again:
            pusher.push(ToyTrainee(3), version=3)
            _assert_serves(again, 3)


@MODES
def test_a_worker_stopped_while_it_loads(engine: ToyEngine, pool: RankPool, options: dict[str, Any], mode: str) -> None:
    stopped = engine.look()["pids"][1]
    engine.fault(1, "SIGSTOP", 2)
    raised = pool.run(_fail, engine.url, options, 4.0)
    try:
        message = _same(raised, DeadlineError)
        assert "the worker on cpu-1 of" in message
        assert "is its process stopped?" in message
        assert "is left paused" in message
    finally:
        os.kill(stopped, signal.SIGCONT)
    pool.run(_push_and_look, engine.url, [3], options)
    _assert_serves(engine, 3)


def test_a_worker_that_raises_while_another_one_is_stopped(engine: ToyEngine, pool: RankPool) -> None:
    """The other one may wait for it in a collective, so the error names the one that raises."""
    stopped = engine.look()["pids"][0]
    engine.fault(0, "SIGSTOP", 2)
    engine.fault(1, "raise", 2)
    raised = pool.run(_fail, engine.url, WHOLE, 4.0)
    try:
        assert all("the layer does not fit" in message for _, message in raised)
    finally:
        os.kill(stopped, signal.SIGCONT)
    pool.run(_push_and_look, engine.url, [3], WHOLE)
    _assert_serves(engine, 3)


def test_a_worker_that_is_busy_when_the_push_begins(engine: ToyEngine, pool: RankPool) -> None:
    """The worker handles the request after the sender has gone, and must not wait for it."""
    stopped = engine.look()["pids"][0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        message = _same(pool.run(_fail, engine.url, WHOLE, 4.0), DeadlineError)
        assert "the worker on cpu-0 of" in message
        assert "did not begin an update within" in message
    finally:
        os.kill(stopped, signal.SIGCONT)
    pool.run(_push_and_look, engine.url, [3], WHOLE)
    _assert_serves(engine, 3)


def _die_at(rank: int, world_size: int, url: str, point: str) -> None:
    with _pusher(url) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        telemetry.observe(lambda name, event: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
        pusher.push(ToyTrainee(2), version=2)


@pytest.mark.parametrize("point", ["push.apply.paused", "push.apply.loaded"])
def test_a_sender_killed_while_the_engine_is_paused(engine: ToyEngine, pool: RankPool, point: str) -> None:
    with RankPool(1) as other:
        other.run(_die_at, engine.url, point, expect_death={0: signal.SIGKILL})
    assert engine.paused
    pool.run(_push_and_look, engine.url, [3], WHOLE)
    _assert_serves(engine, 3)


def test_from_an_engine_that_was_pushed_to(engine: ToyEngine) -> None:
    with toy_engine(2) as giver:
        with Pusher(HttpEngine(giver.url), deadline_s=time_limit(30)) as pusher:
            pusher.push(ToyTrainee(8), version=8)
        with _pusher(engine.url) as pusher:
            assert pusher.push(HttpEngine(giver.url)).version == 8
    _assert_serves(engine, 8)


def test_resources_do_not_grow(engine: ToyEngine) -> None:
    def push(version: int) -> None:
        with _pusher(engine.url, **RING) as pusher:
            pusher.push(ToyTrainee(version), version=version)

    push(1)
    push(2)
    engine_before, before = held_by(engine), held_now()
    for version in (3, 4, 5):
        push(version)
    assert left_since(before, turns=3) == []
    wait_until_it_holds_at_most(engine, engine_before)


def test_targets_other_than_the_model_are_refused(engine: ToyEngine) -> None:
    with Pusher(DraftEngine(_ipc_engine(engine.url)), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(StateError, match="accepts only its model"):
            pusher.push(ToyTrainee(1), version=1)


def test_from_the_command_line(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(7)}, step=70)
    command = ["push", str(tmp_path / "c"), "--to", engine.url, "--protocol", "checkpoint-engine"]
    done = CliRunner().invoke(cli, [*command, "--device", "cpu-0", "--device", "cpu-1"])
    assert done.exit_code == 0, done.output
    assert "the engines serve version 70" in done.output
    _assert_serves(engine, 7)
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 2
    assert "needs the names of its workers' devices" in done.stderr
    done = CliRunner().invoke(cli, [*command, "--cuda-ipc"])
    assert done.exit_code == 2
