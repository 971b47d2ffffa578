"""Pushes that fail, with real processes: one version is served, all ranks raise the cause, the next push works."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from join_probes import arenas, until
from torch import nn
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import (
    BytecheckpointError,
    CorruptionError,
    DeadlineError,
    EngineError,
    MismatchError,
    PlanError,
    RankFailedError,
    UsageError,
)
from bytecheckpoint.inference.push import (
    DraftEngine,
    Engine,
    HttpEngine,
    LocalEngine,
    Pusher,
    RpcEngine,
    sources,
)
from bytecheckpoint.inference.push.sources import StateSource
from bytecheckpoint.inference.push.transports.base import OutgoingChunk
from bytecheckpoint.inference.push.transports.shared_memory import SharedMemoryTransport
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(8, of=__name__)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        for version in (2, 3):  # it has both of its arenas from now on
            _push(started, version)
        yield started


@pytest.fixture
def engine(shared: ToyEngine) -> Iterator[ToyEngine]:
    """Serves version 1."""
    _push(shared, 1)
    mapped = arenas(shared)
    yield shared
    until(lambda: all(now <= then for now, then in zip(arenas(shared), mapped, strict=True)), "no more memory")


def _push(engine: ToyEngine, version: int) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(version), version=version)


def _assert_serves(engine: ToyEngine, version: int) -> None:
    assert engine.look()["digests"] == expected_digests(version, 2)
    assert not engine.paused


def _fail(rank: int, world_size: int, url: str, fault: str = "", deadline_s: float = 30.0) -> tuple[str, str]:
    """Return the class and message of this rank's error."""
    model: Any = ToyTrainee(2)
    if fault == "missing":
        del model.q
    elif fault == "unknown":
        model.extra = nn.Parameter(torch.zeros(3))
    elif fault == "shape":
        model.k = nn.Linear(64, 96)
    model = fully_shard(model) if world_size > 1 else model
    if fault == "kill" and rank == 1:
        _kill_in_third_write()
    try:
        with Pusher(HttpEngine(url), deadline_s=time_limit(deadline_s)) as pusher:
            pusher.push(model, version=2)
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("the push did not fail")


def _kill_in_third_write() -> None:
    writes = 0
    write = SharedMemoryTransport.write

    def dying(transport: SharedMemoryTransport, chunks: Sequence[OutgoingChunk]) -> None:
        nonlocal writes
        for chunk in chunks:
            writes += 1
            if writes == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            write(transport, [chunk])

    SharedMemoryTransport.write = dying  # type: ignore[method-assign]


def _same(raised: list[Any], kind: type[Exception]) -> str:
    """Check that all ranks raised the same error, and return its message."""
    assert {name for name, _ in raised} == {kind.__name__}, raised
    assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
    return str(raised[0][1])


def test_a_missing_tensor(engine: ToyEngine, pool: RankPool) -> None:
    message = _same(pool.run(_fail, engine.url, "missing"), MismatchError)
    assert "qkv: 2,048 of 6,144 elements, from [0, 0] on" in message
    assert "worker 0 of" in message
    assert "serves version 1" in message
    _assert_serves(engine, 1)
    _push(engine, 3)
    _assert_serves(engine, 3)


def test_an_unknown_tensor(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        model = ToyTrainee(2)
        model.extra = nn.Parameter(torch.zeros(3))
        with pytest.raises(MismatchError, match="no module or parameter named 'extra'"):
            pusher.push(model, version=2)
        _assert_serves(engine, 1)
        del model.extra
        pusher.push(model, version=2)
    _assert_serves(engine, 2)


def test_a_wrong_shape(engine: ToyEngine, pool: RankPool) -> None:
    """The shape is larger, so the loader alone would not notice."""
    message = _same(pool.run(_fail, engine.url, "shape"), MismatchError)
    assert "k.weight: it is float32[96, 64], of which the engine uses 4,096 of 6,144 elements" in message
    _assert_serves(engine, 1)


def test_elements_that_no_sender_holds(engine: ToyEngine) -> None:
    class Holey(StateSource):
        def describe(self) -> bytes:
            self.held = [(name, box) for name, box in self.held if name != "out.weight"]
            return super().describe()

    with pytest.MonkeyPatch.context() as patched, Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        patched.setattr(sources, "StateSource", Holey)
        with pytest.raises(PlanError, match=r"out\.weight: no sender has it"):
            pusher.push(ToyTrainee(2), version=2)
    _assert_serves(engine, 1)


def test_a_damaged_chunk(engine: ToyEngine, pool: RankPool) -> None:
    engine.fault(1, "flip")
    message = _same(pool.run(_fail, engine.url), CorruptionError)
    assert "worker 1 of" in message
    assert "1 of " in message
    assert "[" in message
    _assert_serves(engine, 1)
    _push(engine, 3)
    _assert_serves(engine, 3)


def test_a_sender_killed_while_it_writes(engine: ToyEngine) -> None:
    with RankPool(2) as pool:
        (survivor, _) = pool.run(_fail, engine.url, "kill", expect_death={1: signal.SIGKILL})
    assert survivor[0] == RankFailedError.__name__
    assert "rank 1" in survivor[1]
    _assert_serves(engine, 1)
    _push(engine, 3)
    _assert_serves(engine, 3)


@pytest.mark.parametrize("worker", [0, 1])
def test_all_workers_roll_back_when_one_fails_half_way(engine: ToyEngine, worker: int) -> None:
    engine.fault(worker, "fail", 1)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(EngineError, match="the layer does not fit") as raised:
            pusher.push(ToyTrainee(2), version=2)
        assert f"worker {worker} of" in str(raised.value)
        assert "serves version 1" in str(raised.value)
        assert [one["version"] for one in pusher.state()[0]] == [1, 1]
        _assert_serves(engine, 1)
        pusher.push(ToyTrainee(3), version=3)
        _assert_serves(engine, 3)


def test_a_damaged_chunk_that_is_served_is_sent_by_the_next_push(engine: ToyEngine) -> None:
    engine.fault(1, "damage", 1000)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(CorruptionError, match="push it again"):
            pusher.push(ToyTrainee(1), version=2)
        report = pusher.push(ToyTrainee(1), version=2)
        assert report.workers[1].sent > 0
        assert pusher.state()[0][1]["intact"]
    _assert_serves(engine, 1)


def test_all_engines_roll_back_when_one_fails(engine: ToyEngine) -> None:
    with toy_engine(2) as other:
        _push(other, 1)
        other.fault(0, "fail", 1)
        before = len(engine.look()["log"])
        with Pusher([HttpEngine(engine.url), HttpEngine(other.url)], deadline_s=time_limit(30)) as pusher:
            with pytest.raises(EngineError, match="the layer does not fit"):
                pusher.push(ToyTrainee(2), version=2)
            _assert_serves(engine, 1)
            _assert_serves(other, 1)
            # The engine that loaded the version never answered a request with it.
            requests = [path for path in engine.look()["log"][before:] if path in ("/pause", "/resume")]
            assert requests == ["/pause", "/resume"]
            pusher.push(ToyTrainee(3), version=3)
        _assert_serves(engine, 3)
        _assert_serves(other, 3)


def test_an_engine_that_cannot_roll_back_stays_paused_until_the_next_push(engine: ToyEngine) -> None:
    engine.fault(0, "fail", 2)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(EngineError, match="is left paused; push again, or restart it"):
            pusher.push(ToyTrainee(2), version=2)
        assert engine.paused
        assert pusher.state()[0][0]["inconsistent_reason"]
        pusher.push(ToyTrainee(3), version=3)
        assert not pusher.state()[0][0]["inconsistent_reason"]
    _assert_serves(engine, 3)


@pytest.mark.parametrize("can_restore", [False, True])
def test_the_first_push_fails_half_way(can_restore: bool) -> None:
    with toy_engine(1) as engine, Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        engine.fault(0, "fail", 1)
        if can_restore:
            engine.fault(0, "can_restore")
        with pytest.raises(EngineError, match="the layer does not fit") as raised:
            pusher.push(ToyTrainee(2), version=2)
        assert ("serves what it started with" if can_restore else "serves no consistent version") in str(raised.value)
        assert engine.paused is not can_restore
        if can_restore:
            assert engine.look()["digests"] == expected_digests(0, 1)
        pusher.push(ToyTrainee(3), version=3)
        assert engine.look()["digests"] == expected_digests(3, 1)
        assert not engine.paused


def test_a_killed_worker(pool: RankPool) -> None:
    with toy_engine(2) as engine:
        _push(engine, 1)
        os.kill(engine.look()["pids"][1], signal.SIGKILL)
        message = _same(pool.run(_fail, engine.url), EngineError)
        assert message.startswith(f"{engine.url} has ended: its server or one of its workers was killed or failed")
        assert "--worker-extension-cls" not in message


def test_a_late_sender_writes_into_unused_memory(engine: ToyEngine) -> None:
    """For example a sender that was stopped while it wrote, and continues long after its push has failed."""
    late: list[torch.Tensor] = []

    def fail(transport: SharedMemoryTransport, *args: Any) -> None:
        late.append(transport._memory)
        raise OSError("broken")

    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SharedMemoryTransport, "write", fail)
            with pytest.raises(OSError, match="broken"):
                pusher.push(ToyTrainee(2), version=2)
        pusher.push(ToyTrainee(3), version=3)
        for memory in late:
            memory.fill_(7)
        assert pusher.state()[0][0]["intact"]
        pusher.push(ToyTrainee(4), version=4)
        _assert_serves(engine, 4)


def test_a_stopped_worker(engine: ToyEngine, pool: RankPool) -> None:
    stopped = engine.look()["pids"][1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        message = _same(pool.run(_fail, engine.url, "", 3.0), DeadlineError)
        assert "did not answer within" in message
        assert "is one of its workers stopped?" in message
    finally:
        os.kill(stopped, signal.SIGCONT)
    _assert_serves(engine, 1)
    _push(engine, 3)
    _assert_serves(engine, 3)


def test_a_worker_stopped_while_its_weights_change(engine: ToyEngine) -> None:
    stopped = engine.look()["pids"][1]
    engine.fault(1, "stop in apply")
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(3)) as pusher:
        with pytest.raises(DeadlineError, match=r"unknown what .* serves now; .* paused.*`bcp push --resume http"):
            pusher.push(ToyTrainee(2), version=2)
        os.kill(stopped, signal.SIGCONT)
        until(lambda: not engine.paused, "resumed, because its worker answers again")
        _assert_serves(engine, 1)
        pusher.push(ToyTrainee(3), version=3)
    _assert_serves(engine, 3)


def test_a_worker_of_one_of_two_engines_stopped_while_its_weights_change(engine: ToyEngine) -> None:
    stopped = engine.look()["pids"][1]
    engine.fault(1, "stop in apply")
    with toy_engine(2) as other:
        _push(other, 1)
        with Pusher([HttpEngine(engine.url), HttpEngine(other.url)], deadline_s=time_limit(3)) as pusher:
            try:
                with pytest.raises(DeadlineError, match="unknown what"):
                    pusher.push(ToyTrainee(2), version=2)
                _assert_serves(other, 1)
            finally:
                os.kill(stopped, signal.SIGCONT)
            until(lambda: not engine.paused, "resumed, because its worker answers again")
            _assert_serves(engine, 1)


def test_a_server_that_does_not_drop_its_cache(engine: ToyEngine) -> None:
    """It would answer with the old weights, so it stays paused."""
    with Pusher(HttpEngine(engine.url, pause="keep"), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(2), version=2)
        requests = [path for path in engine.look()["log"] if path not in ("/collective_rpc", "/look")]
        assert requests[-4:] == ["/pause", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        engine.fault(0, "keep cache", True)
        try:
            with pytest.raises(EngineError, match=r"(?s)did not drop its prefix cache.*`bcp push --resume http"):
                pusher.push(ToyTrainee(3), version=3)
            assert engine.paused
            with pytest.raises(EngineError, match="did not drop its prefix cache"):
                pusher.resume()
            assert engine.paused
        finally:
            engine.fault(0, "keep cache", False)
        assert pusher.resume() == [3]
    _assert_serves(engine, 3)


def test_an_unreachable_engine(pool: RankPool) -> None:
    message = _same(pool.run(_fail, "http://127.0.0.1:9", "", 10.0), EngineError)
    assert "is the engine up?" in message


def _push_to_own(rank: int, world_size: int, urls: list[str]) -> str:
    with Pusher(HttpEngine(urls[rank]), deadline_s=time_limit(30)) as pusher:
        try:
            pusher.push(fully_shard(ToyTrainee(4)), version=4)
        except BytecheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_engine_that_only_another_rank_has(engine: ToyEngine, pool: RankPool) -> None:
    errors = pool.run(_push_to_own, [engine.url, "http://127.0.0.1:9"])
    for error in errors:
        assert error.startswith("StateError: ")
        assert "rank 1 passed engines that rank 0 did not pass: http://127.0.0.1:9 (on " in error
        assert "); only rank 0 sends requests" in error
    _assert_serves(engine, 1)
    assert pool.run(_push_to_own, [engine.url, engine.url]) == ["", ""]
    _assert_serves(engine, 4)


def _engines() -> list[Engine]:
    """Those that are the same engine wherever they are made, then others."""
    server, actor = HttpEngine("http://host:9"), RpcEngine(print, name="actor", identity="5f3a")
    same = [server, DraftEngine(server), actor, DraftEngine(actor)]
    other = RpcEngine(print, name="actor")
    return [*same, other, DraftEngine(other), LocalEngine(SimpleNamespace(collective_rpc=print))]


def _identities(rank: int, world_size: int) -> list[str]:
    return [engine.identity for engine in _engines()]


def test_which_engines_of_two_ranks_are_the_same(pool: RankPool) -> None:
    first, second = pool.run(_identities)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True] * 4 + [False] * 3
    here = HttpEngine("http://localhost:9").identity
    assert here == f"http://localhost:9 (on {socket.gethostname()})"


def test_no_engine_given() -> None:
    with Pusher() as pusher, pytest.raises(UsageError, match="rank 0 has no engine to push to"):
        pusher.push(ToyTrainee(1))
