"""Joins that fail, with real processes: all engines keep serving what they served, and the next join works."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from join_probes import arenas, giving, until
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.control.acceptor import connect
from bytecheckpoint.control.connections import Endpoint, at_most, receive
from bytecheckpoint.errors import (
    BytecheckpointError,
    CorruptionError,
    DeadlineError,
    EngineError,
    StateError,
    UsageError,
)
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push import joins as joining
from bytecheckpoint.inference.push.engines.base import ask_all
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(6, of=__name__)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ToyEngine, ToyEngine]]:
    with toy_engine(2) as holder, toy_engine(1) as engine:
        yield holder, engine


@pytest.fixture
def holder(shared: tuple[ToyEngine, ToyEngine]) -> ToyEngine:
    """Serves version 1."""
    _push(shared[0], 1)
    return shared[0]


@pytest.fixture
def engine(shared: tuple[ToyEngine, ToyEngine]) -> ToyEngine:
    """Serves version 2, holds no other version, and joins."""
    with Pusher(HttpEngine(shared[1].url), deadline_s=time_limit(30)) as pusher:
        pusher.release()
        pusher.push(ToyTrainee(2), version=2)
    return shared[1]


def _push(engine: ToyEngine, version: int) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(version), version=version)


def _assert_serves(engine: ToyEngine, version: int) -> None:
    seen = engine.look()
    assert seen["digests"] == expected_digests(version, len(seen["digests"]))
    assert not engine.paused


def _join(holder: str, engine: str, deadline_s: float = time_limit(30), tcp: bool = True) -> None:
    with Pusher(HttpEngine(engine), deadline_s=deadline_s, tcp_only=tcp) as pusher:
        pusher.push(HttpEngine(holder))


def _fail(rank: int, world_size: int, holder: str, engine: str, deadline_s: float = 30.0) -> tuple[str, str]:
    """Return the class and message of this rank's error."""
    try:
        _join(holder, engine, time_limit(deadline_s))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("the push did not fail")


def _same(raised: list[Any], kind: type[Exception]) -> str:
    """Check that all ranks raised the same error, and return its message."""
    assert {name for name, _ in raised} == {kind.__name__}, raised
    assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
    return str(raised[0][1])


def _works(holder: ToyEngine, engine: ToyEngine) -> None:
    """Check that the transfer has ended and that the next join works."""
    until(lambda: max(holder.look()["threads"]) == 1, "its threads have ended")
    _assert_serves(holder, 1)
    _assert_serves(engine, 2)
    _join(holder.url, engine.url)
    _assert_serves(engine, 1)


def test_a_holder_without_a_pushed_version(holder: ToyEngine, engine: ToyEngine, pool: RankPool) -> None:
    with toy_engine(1) as fresh:
        message = _same(pool.run(_fail, fresh.url, engine.url), StateError)
        assert "it has no bytes to send, as it serves what it started with" in message
        assert f"worker 0 of {fresh.url}" in message
    with Pusher(HttpEngine(holder.url), deadline_s=time_limit(30)) as pusher:
        pusher.release()
    with pytest.raises(StateError, match="it serves version 1, or its memory was released or is short"):
        _join(holder.url, engine.url)
    _push(holder, 1)
    _works(holder, engine)


def test_a_holder_that_serves_no_consistent_version(holder: ToyEngine, engine: ToyEngine) -> None:
    holder.fault(1, "fail", 2)
    with pytest.raises(EngineError, match="is left paused"):
        _push(holder, 3)
    with pytest.raises(StateError, match=r"it serves no consistent version .*push into it first"):
        _join(holder.url, engine.url)
    # Nor does the other worker, which could give, keep it.
    for version in (3, 4, 1):
        _push(holder, version)
    assert arenas(holder) == [2, 2]
    _works(holder, engine)


def test_a_damaged_holder(holder: ToyEngine, engine: ToyEngine, pool: RankPool) -> None:
    holder.fault(1, "damage", 1000)
    message = _same(pool.run(_fail, holder.url, engine.url), CorruptionError)
    assert f"worker 1 of {holder.url}" in message
    assert "version 1 is damaged in memory: experts [0:1,32:64,0:64]" in message
    _assert_serves(engine, 2)
    with pytest.raises(CorruptionError):
        _join(holder.url, engine.url, tcp=False)
    holder.fault(1, "damage", 1000)
    _works(holder, engine)


def test_a_damaged_holder_of_a_stream(holder: ToyEngine, engine: ToyEngine) -> None:
    """The chunks that arrived before are loaded, as in any stream."""
    holder.fault(1, "damage", 1000)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), memory_bytes=40_000, chunk_bytes=4000) as pusher:
        with pytest.raises(CorruptionError, match=r"(?s)is damaged in memory.*is left paused"):
            pusher.push(HttpEngine(holder.url))
        assert engine.paused
        holder.fault(1, "damage", 1000)
        pusher.push(HttpEngine(holder.url))
    _assert_serves(engine, 1)
    _assert_serves(holder, 1)


def test_the_holder_is_killed_while_it_sends(engine: ToyEngine, pool: RankPool) -> None:
    with toy_engine(2) as holder, ThreadPoolExecutor(1) as threads:
        _push(holder, 1)
        with giving(holder) as begun:
            join = threads.submit(pool.run, _fail, holder.url, engine.url)
            begun(join)
            os.kill(holder.look()["pids"][0], signal.SIGKILL)
            message = _same(join.result(), EngineError)
        assert f"worker 0 of {holder.url} sends no more, as it ended or released its memory" in message
    _assert_serves(engine, 2)
    _push(engine, 3)
    _assert_serves(engine, 3)


def test_the_holder_is_stopped_while_it_sends(holder: ToyEngine, engine: ToyEngine, pool: RankPool) -> None:
    stopped = holder.look()["pids"][0]
    with ThreadPoolExecutor(1) as threads, giving(holder) as begun:
        join = threads.submit(pool.run, _fail, holder.url, engine.url, 5.0)
        begun(join)
        os.kill(stopped, signal.SIGSTOP)
        try:
            message = _same(join.result(), DeadlineError)
            assert f"worker 0 of {holder.url} sent nothing for" in message
        finally:
            os.kill(stopped, signal.SIGCONT)
    _works(holder, engine)


@pytest.mark.parametrize("late", [False, True])
def test_the_joining_engine_is_killed(holder: ToyEngine, late: bool) -> None:
    with toy_engine(1) as engine, ThreadPoolExecutor(1) as threads:
        pid = engine.look()["pids"][0]
        if late:
            with giving(holder) as begun:
                join = threads.submit(_join, holder.url, engine.url)
                begun(join)
                os.kill(pid, signal.SIGKILL)
        else:
            engine.fault(0, "stop after prepare")
            join = threads.submit(_join, holder.url, engine.url)
            until(lambda: _is_stopped(pid), "it is stopped")
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"cannot be reached|connection to the worker"):
            join.result()
    until(lambda: max(holder.look()["threads"]) == 1, "its threads have ended")
    _assert_serves(holder, 1)


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2][0] == "T"


def test_the_joining_engine_is_stopped(holder: ToyEngine, engine: ToyEngine) -> None:
    pid = engine.look()["pids"][0]
    engine.fault(0, "stop after prepare")
    try:
        with pytest.raises(EngineError, match=r"cannot be reached .*no answer in time"):
            _join(holder.url, engine.url)
        until(lambda: max(holder.look()["threads"]) == 1, "its threads have ended")
    finally:
        os.kill(pid, signal.SIGCONT)
    _works(holder, engine)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in(rank: int, world_size: int, holder: str, engine: str, where: type, method: str, *how: Any) -> None:
    setattr(where, method, _die)
    _join(holder, engine, *how)


@pytest.mark.parametrize("tcp", [False, True])
def test_rank_0_is_killed(holder: ToyEngine, engine: ToyEngine, tcp: bool) -> None:
    with RankPool(1) as pool:
        where = joining.EngineSource, "fetch"
        pool.run(_die_in, holder.url, engine.url, *where, time_limit(30), tcp, expect_death={0: signal.SIGKILL})
    _works(holder, engine)


def test_rank_0_is_killed_before_it_connects(holder: ToyEngine, engine: ToyEngine) -> None:
    """The holder keeps the version until the deadline."""
    with RankPool(1) as pool:
        where = joining._Worker, "__init__"
        pool.run(_die_in, holder.url, engine.url, *where, 5.0, expect_death={0: signal.SIGKILL})

    versions = itertools.cycle((3, 6))

    def has_two_arenas_after_a_push() -> bool:
        _push(holder, next(versions))
        return arenas(holder) == [2, 2]

    for version in (4, 5):
        _push(holder, version)
    assert arenas(holder) == [3, 3]
    until(has_two_arenas_after_a_push, "what was kept is given up")
    _push(holder, 1)
    _works(holder, engine)


def test_a_join_that_fails_early_releases_its_hold(holder: ToyEngine) -> None:
    with pytest.raises(EngineError, match="is the engine up"):
        _join(holder.url, "http://127.0.0.1:9")
    until(lambda: max(holder.look()["threads"]) == 1, "its threads have ended")
    for version in (3, 4):
        _push(holder, version)
    assert arenas(holder) == [2, 2]


def test_the_holder_releases_its_memory_while_it_sends(holder: ToyEngine, engine: ToyEngine) -> None:
    with ThreadPoolExecutor(1) as threads, giving(holder) as begun:
        join = threads.submit(_join, holder.url, engine.url)
        begun(join)
        with Pusher(HttpEngine(holder.url), deadline_s=time_limit(30)) as pusher:
            pusher.release()
            with pytest.raises(EngineError, match="sends no more, as it ended or released its memory"):
                join.result()
    until(lambda: arenas(holder) == [0, 0], "nothing is read any more")
    _push(holder, 1)
    _works(holder, engine)


def test_another_join_of_the_same_engine(holder: ToyEngine, engine: ToyEngine) -> None:
    with ThreadPoolExecutor(2) as threads, giving(holder) as begun:
        first = threads.submit(_join, holder.url, engine.url)
        begun()
        second = threads.submit(_join, holder.url, engine.url)
        until(lambda: holder.look()["waiting"][0] == 2, "both have begun")
        for worker in range(2):
            holder.fault(worker, "go on")
        with pytest.raises(EngineError, match=r"this push is over: another one|connection to the worker .* broke"):
            first.result()
    second.result()
    _assert_serves(engine, 1)


def test_the_joining_engine_gets_another_push(holder: ToyEngine, engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(UsageError, match="rename= and exclude= apply to tensors"):
            pusher.push(HttpEngine(holder.url), rename=str)
        with pytest.raises(EngineError, match="is the engine up"):
            pusher.push(HttpEngine("http://127.0.0.1:9"))
        pusher.push(HttpEngine(holder.url))
    _assert_serves(engine, 1)
    with Pusher() as pusher, pytest.raises(UsageError, match="rank 0 has no engine to push to"):
        pusher.push(HttpEngine(holder.url))


def test_a_sender_that_is_stopped_lets_the_version_go_in_the_end(holder: ToyEngine, engine: ToyEngine) -> None:
    answers = ask_all(HttpEngine(holder.url), "hold", {"deadline_s": 0.5}, time_limit(30))
    connections = [connect(Endpoint(*answer["endpoint"])) for answer in answers]
    for connection in connections:  # asks for nothing, as one that maps the memory
        with connection, pytest.raises(OSError, match="ended"):
            receive(connection, 1, at_most(time_limit(30)))
    _works(holder, engine)


def test_what_was_checked_does_not_change_with_the_memory_of_the_holder(holder: ToyEngine) -> None:
    """A sender that was stopped between its check and its write would send what another push has put there."""
    source = joining.EngineSource(HttpEngine(holder.url), time_limit(30), tcp_only=False)
    try:
        found = source.fetch(source.held)
        mapped = [worker._memory for worker in source._workers]
        assert all(memory is not None for memory in mapped)
        for memory in mapped:
            begin = memory.data_ptr()  # type: ignore[union-attr]
            end = begin + memory.nbytes  # type: ignore[union-attr]
            assert not any(begin <= one.data_ptr() < end for one in found)
    finally:
        source.close()
