"""Pushes into real worker processes: what arrives, and how many bytes are sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from join_probes import held_by, wait_until_it_holds_at_most
from leak_watch import held_now, left_since
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, digest_of, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.errors import EngineError, StateError
from bytecheckpoint.inference.push import HttpEngine, Pusher, PushReport
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(4, of=__name__)


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


def _sharded(version: int) -> Any:
    model = ToyTrainee(version)
    return fully_shard(model) if torch.distributed.is_initialized() else model


def _push_and_look(rank: int, world_size: int, url: str, versions: list[int], tcp: bool) -> list[Any]:
    """Return the report of each push, and on rank 0 the digests of the engine's workers after it."""
    found = []
    with Pusher(HttpEngine(url), deadline_s=time_limit(30), tcp_only=tcp) as pusher:
        for version in versions:
            report = pusher.push(_sharded(version), version=version)
            found.append((report, ToyEngine(url).look()["digests"] if rank == 0 else []))
    return found


def _push_all(rank: int, world_size: int, url: str, versions: list[int], tcp: bool = False) -> list[PushReport]:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30), tcp_only=tcp) as pusher:
        return [pusher.push(_sharded(version), version=version) for version in versions]


@pytest.mark.parametrize("tcp", [False, True])
def test_ten_updates_in_a_row(engine: ToyEngine, pool: RankPool, tcp: bool) -> None:
    before, versions = engine.look(), range(1, 11)
    first, *others = pool.run(_push_and_look, engine.url, list(versions), tcp)
    assert [digests for _, digests in first] == [expected_digests(version, 2) for version in versions]
    for other in others:
        assert [report for report, _ in other] == [report for report, _ in first]
    after = engine.look()
    assert after["rehearsals"][0] - before["rehearsals"][0] <= 1
    assert not engine.paused


@pytest.mark.parametrize("tcp", [False, True])
def test_resources_do_not_grow(engine: ToyEngine, tcp: bool) -> None:
    _push_all(0, 1, engine.url, [11, 12], tcp)
    engine_before, before = held_by(engine), held_now()
    for version in (13, 14, 15):
        _push_all(0, 1, engine.url, [version], tcp)
    assert left_since(before, turns=3) == []
    wait_until_it_holds_at_most(engine, engine_before)


def test_each_worker_gets_its_part_once(pool: RankPool) -> None:
    with toy_engine(2) as engine:
        (report,) = pool.run(_push_all, engine.url, [1])[0]
        assert report.engine_bytes == sum(tensor.nbytes for tensor in ToyTrainee(1).state_dict().values())
        for worker in report.workers:
            assert worker.sent == worker.requested
            assert worker.requested < 0.6 * report.engine_bytes
        assert sum(report.written) == sum(worker.sent for worker in report.workers)
        assert min(report.written) > 0


def test_unchanged_chunks_are_not_sent(engine: ToyEngine) -> None:
    model = ToyTrainee(30)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(model, version=30)
        with torch.no_grad():
            model.norm += 1
        second = pusher.push(model, version=31)
        assert [worker.sent for worker in second.workers] == [model.norm.nbytes] * 2
        assert all(worker.unchanged for worker in second.workers)
        third = pusher.push(model, version=32)
        assert [worker.sent for worker in third.workers] == [0, 0]
        assert sum(worker.unchanged for worker in third.workers) == 2 * model.norm.nbytes
        assert engine.look()["digests"] == [digest_of(model, 2, rank) for rank in range(2)]
        assert [one["version"] for one in pusher.state()[0]] == [32, 32]
        assert all(one["intact"] for one in pusher.state()[0])


def test_a_version_of_the_same_bytes_is_not_loaded(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        for version in (7, 8):
            pusher.push(ToyTrainee(version), version=version)
        for worker in (0, 1):
            engine.fault(worker, "fail", 1)  # in the next load
        report = pusher.push(ToyTrainee(8), version=9)
        assert [worker.sent for worker in report.workers] == [0, 0]
        assert [(one["version"], one["intact"]) for one in pusher.state()[0]] == [(9, True)] * 2
        with pytest.raises(EngineError, match="the layer does not fit"):
            pusher.push(ToyTrainee(7), version=10)
        assert [(one["version"], one["intact"]) for one in pusher.state()[0]] == [(9, True)] * 2
        pusher.push(ToyTrainee(8), version=11)
        assert pusher.rollback() == 9
        assert engine.look()["digests"] == expected_digests(8, 2)
        pusher.push(ToyTrainee(8), version=12)
        pusher.push(ToyTrainee(7), version=13)
        assert pusher.rollback() == 12
        assert engine.look()["digests"] == expected_digests(8, 2)
        pusher.push(ToyTrainee(8), version=14)
        engine.fault(0, "reload")  # by itself
        pusher.push(ToyTrainee(8), version=15)
        assert engine.look()["digests"] == expected_digests(8, 2)
        pusher.push(ToyTrainee(8), version=16)
        pusher.release()
        with pytest.raises(StateError, match="version before"):
            pusher.rollback()
        pusher.push(ToyTrainee(7), version=17)
    assert engine.look()["digests"] == expected_digests(7, 2)


def test_from_a_checkpoint(engine: ToyEngine, pool: RankPool, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(40)}, step=400)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        assert pusher.push(bcp.open(tmp_path / "c")).version == 400
    assert engine.look()["digests"] == expected_digests(40, 2)
    bcp.save(tmp_path / "d", {"model": ToyTrainee(41)}, step=410)
    reports = pool.run(_push_checkpoint, engine.url, str(tmp_path / "d"))
    assert engine.look()["digests"] == expected_digests(41, 2)
    assert min(reports[0].written) > 0


def _push_checkpoint(rank: int, world_size: int, url: str, path: str) -> PushReport:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        return pusher.push(bcp.open(path))


def test_senders_cast(pool: RankPool) -> None:
    with toy_engine(2, "bfloat16") as engine:
        (report,) = pool.run(_push_all, engine.url, [5])[0]
        assert engine.look()["digests"] == expected_digests(5, 2, torch.bfloat16)
        # All but the one tensor whose value the loader reads.
        assert all(worker.requested < 0.32 * report.engine_bytes for worker in report.workers)


def test_several_engines(engine: ToyEngine, pool: RankPool) -> None:
    with toy_engine(1) as other:
        pool.run(_push_to_two, engine.url, other.url)
        assert engine.look()["digests"] == expected_digests(50, 2)
        assert other.look()["digests"] == expected_digests(50, 1)


def _push_to_two(rank: int, world_size: int, *urls: str) -> None:
    engines = [HttpEngine(url) for url in urls] if rank == 0 else None
    with Pusher(engines, deadline_s=time_limit(30)) as pusher:
        pusher.push({"model": _sharded(50)}, version=50)


def test_a_restarted_worker_is_asked_again(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(60), version=60)
        engine.fault(1, "forget")
        report = pusher.push(ToyTrainee(61))
        assert report.version == 61
        assert engine.look()["digests"] == expected_digests(61, 2)


def test_memory_is_released(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(70), version=70)
        pusher.push(ToyTrainee(71), version=71)
        assert pusher.state()[0][0]["bytes"] > 0
        pusher.release()
        assert pusher.state()[0][0]["bytes"] == 0
        pusher.push(ToyTrainee(72), version=72)
    assert engine.look()["digests"] == expected_digests(72, 2)
