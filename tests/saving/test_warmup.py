"""Warming up: afterwards a save plans nothing, takes no new memory and starts no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_training import differing, memory, training

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import StateError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WAIT_S = time_limit(60)


def _threads(saver: bcp.Checkpointer) -> set[threading.Thread]:
    pools = (saver._session.engine.io, saver._session.engine.background, saver._session.engine.helpers)
    return {thread for pool in pools for thread in pool._threads}


def test_the_first_save_is_like_the_second(tmp_path: Path) -> None:
    state = training(1.0)
    with bcp.Checkpointer() as saver:
        saver.warmup(state)
        arena = saver._session.engine.arena
        before, threads = arena.nbytes, _threads(saver)
        assert before == 2 * arena.block_size
        assert all(block._warm == block.nbytes for block in arena._idle)
        assert len(saver._session.engine.plans) == 1
        for index in range(3):
            handle = saver.save(tmp_path / str(index), state, async_save=True)
            handle.result(WAIT_S)
        assert arena.nbytes == before
        assert _threads(saver) == threads
        assert len(saver._session.engine.plans) == 1
    loaded = training(9.0)
    bcp.load(tmp_path / "0", loaded)
    assert not differing(memory(loaded), memory(state))


def test_nothing_is_written_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = training(1.0)
    before = memory(state)
    bcp.warmup(state)
    assert not differing(memory(state), before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("slots", "blocks"), [(0, 0), (1, 1), (5, 3)])
def test_no_more_memory_than_asked_or_allowed(slots: int, blocks: int) -> None:
    with bcp.Checkpointer(slots=2) as saver:
        saver.warmup(training(1.0), slots=slots)
        assert saver._session.engine.arena.nbytes == blocks * saver._session.engine.arena.block_size
    with bcp.Checkpointer(memory_budget=100 << 10) as saver:
        saver.warmup(training(1.0), slots=slots)
        assert saver._session.engine.arena.nbytes <= 100 << 10


def test_while_a_save_is_on_its_way(tmp_path: Path) -> None:
    go_on = threading.Event()
    stop = telemetry.observe(lambda name, event: None if name != "save.write" else go_on.wait(WAIT_S) and None)
    try:
        with bcp.Checkpointer() as saver:
            handle = saver.save(tmp_path, training(1.0), async_save=True)
            saver.warmup(training(2.0))
            assert saver._session.engine.arena.nbytes == 2 * saver._session.engine.arena.block_size
            go_on.set()
            handle.result(WAIT_S)
    finally:
        go_on.set()
        stop()


@pytest.mark.parametrize("slots", [-1, 1.5, None])
def test_strange_slots(slots: Any) -> None:
    with pytest.raises(UsageError, match="slots"):
        bcp.warmup(training(1.0), slots=slots)


def test_what_cannot_be_saved_cannot_be_warmed_up() -> None:
    with pytest.raises(StateError):
        bcp.warmup({"extra_state": {"f": print}})
    with bcp.Checkpointer() as saver:
        pass
    with pytest.raises(UsageError, match="closed"):
        saver.warmup(training(1.0))


def _warm_and_save(rank: int, world_size: int, path: str) -> list[Any]:
    state = training(1.0, shard=True)
    with bcp.Checkpointer() as saver:
        saver.warmup(state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
        planned = len(saver._session.engine.plans)
        saver.save(path, state, async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30))).result(
            time_limit(60)
        )
        loaded = training(9.0, shard=True)
        saver.load(path, loaded, options=bcp.LoadOptions(deadline_s=time_limit(30)))
        return [planned, len(saver._session.engine.plans), differing(memory(loaded), memory(state))]


def _warm_badly(rank: int, world_size: int) -> str:
    try:
        bcp.warmup(
            {"extra_state": {"f": print if rank == 1 else 1}}, options=bcp.SaveOptions(deadline_s=time_limit(30))
        )
    except bcp.errors.BytecheckpointError as error:
        results = type(error).__name__
    bcp.warmup(training(1.0, shard=True), options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return results


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_ranks_warm_up_together(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_warm_and_save, str(tmp_path)) == [[1, 1, []]] * 2


def test_one_ranks_failure_is_everyones(pool: RankPool) -> None:
    assert pool.run(_warm_badly) == ["UnserializableError", "UnserializableError"]
