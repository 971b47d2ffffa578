"""Pushes over a group: a shared chunk leaves its sender once, and its replica set broadcasts it."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from join_probes import held_by, wait_until_it_holds_at_most
from leak_watch import held_now, left_since
from sampling import examples
from streams import RING, fail, push_and_look, same
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.control.addresses import ADDRESS_VARIABLE, PORTS_VARIABLE, listen
from bytecheckpoint.errors import (
    ControlError,
    CorruptionError,
    DeadlineError,
    EngineError,
    RankFailedError,
    StateError,
    UsageError,
)
from bytecheckpoint.frameworks.digests import digest_on_device
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push import pusher as pusher_module
from bytecheckpoint.inference.push.memory import STREAMED
from bytecheckpoint.inference.push.transports.base import OutgoingChunk, TransportBroken, word_digests
from bytecheckpoint.inference.push.transports.group import GroupRendezvous, join_group
from bytecheckpoint.inference.push.transports.group_transport import GroupTransport
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(9, of=__name__)

GROUP = {**RING, "group": "gloo"}
WIDE = {"group": "gloo"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.fixture(scope="module")
def other() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.mark.parametrize("options", [GROUP, WIDE])
def test_ten_updates_in_a_row(engine: ToyEngine, pool: RankPool, options: dict[str, Any]) -> None:
    first, *_ = pool.run(push_and_look, [engine.url], list(range(1, 11)), options)
    assert [digests for _, (digests,) in first] == [expected_digests(version, 2) for version in range(1, 11)]
    assert not engine.paused


@pytest.mark.parametrize("options", [GROUP, WIDE])
def test_two_engines(engine: ToyEngine, other: ToyEngine, pool: RankPool, options: dict[str, Any]) -> None:
    first, *_ = pool.run(push_and_look, [engine.url, other.url], [1, 2, 3], options)
    for version, (report, digests) in enumerate(first, 1):
        assert digests == [expected_digests(version, 2)] * 2
        assert report.mode == STREAMED


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1", "0.0.0.0"])
def test_where_members_meet(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv(PORTS_VARIABLE, f"{port}-{min(port + 20, 65535)}")
    if address:
        monkeypatch.setenv(ADDRESS_VARIABLE, address)
    try:
        listen().close()
    except ControlError:
        pytest.skip("this host has no such address")
    rendezvous = GroupRendezvous("gloo", time_limit(10))
    found = rendezvous.address(["a"], ["b"], [""])
    assert port <= found.port <= port + 20
    with ThreadPoolExecutor(2) as threads:
        members = list(threads.map(lambda rank: join_group(found, rank), range(2)))
    for member in members:
        member.leave()
    rendezvous.close()


@pytest.mark.parametrize("how", ["check", "broken"])
def test_an_error_that_is_kept_does_not_keep_connections(how: str) -> None:
    """A member that leaves is noticed by one that waits for it, whenever Python collects cycles."""
    rendezvous = GroupRendezvous("gloo", time_limit(60))
    found = rendezvous.address(["a"], ["b", "c"], [""])
    with ThreadPoolExecutor(3) as threads:
        members = list(threads.map(lambda rank: join_group(found, rank), range(3)))
        gc.disable()
        try:
            waiting = threads.submit(members[2].receive, 1, [torch.zeros(8)], lambda: None)
            if how == "broken":
                members[0].leave()
            with pytest.raises(TransportBroken if how == "broken" else StateError) as kept:
                members[1].receive(0, [torch.zeros(8)], _stop if how == "check" else lambda: None)
            members[1].leave()
            with pytest.raises(TransportBroken):
                waiting.result(time_limit(20))
            assert kept.value.__traceback__ is not None
        finally:
            gc.enable()
    rendezvous.close()


def _stop() -> None:
    raise StateError("the push is over")


def _push(engine: ToyEngine, version: int) -> None:
    push_and_look(0, 1, [engine.url], [version], GROUP)
    assert engine.look()["digests"] == expected_digests(version, 2)
    assert not engine.paused


def test_a_damaged_chunk(engine: ToyEngine, pool: RankPool) -> None:
    _push(engine, 1)
    message = same(pool.run(fail, engine.url, "damage", GROUP), CorruptionError)
    assert "did not arrive as it was sent" in message
    assert "is left paused; push again, or restart it" in message
    assert engine.paused
    _push(engine, 3)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_sender_killed_while_it_sends(engine: ToyEngine, faulty: int) -> None:
    _push(engine, 1)
    with RankPool(2) as pool:
        found = pool.run(fail, engine.url, "SIGKILL", GROUP, 30.0, faulty, expect_death={faulty: signal.SIGKILL})
    survivor = found[1 - faulty]
    assert survivor[0] == RankFailedError.__name__
    assert f"rank {faulty}" in survivor[1]
    if faulty:
        assert "is left paused; push again, or restart it" in survivor[1]
        assert engine.paused
    else:  # rank 0 may have been killed before it paused the engine
        assert engine.paused or engine.look()["digests"] == expected_digests(1, 2)
    _push(engine, 3)


def test_a_sender_stopped_while_it_sends(engine: ToyEngine) -> None:
    _push(engine, 1)
    with RankPool(2) as pool:
        (survivor, _) = pool.run(fail, engine.url, "SIGSTOP", GROUP, 4.0, expect_death={1: signal.SIGKILL})
    assert survivor[0] == DeadlineError.__name__
    assert "for rank(s) 1 of 2" in survivor[1]
    assert "is left paused; push again, or restart it" in survivor[1]
    _push(engine, 3)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_fails_half_way(engine: ToyEngine, pool: RankPool, worker: int) -> None:
    _push(engine, 1)
    engine.fault(worker, "fail", 1)
    message = same(pool.run(fail, engine.url, "", GROUP), EngineError)
    assert f"worker {worker} of" in message
    assert "the layer does not fit" in message
    assert "is left paused; push again, or restart it" in message
    assert engine.paused
    _push(engine, 3)


@pytest.mark.parametrize("what", ["die in apply", "stop in apply"])
def test_a_worker_that_is_gone(pool: RankPool, what: str) -> None:
    with toy_engine(2) as engine:
        _push(engine, 1)
        engine.fault(1, what)
        raised = pool.run(fail, engine.url, "", GROUP, 4.0)
        assert {name for name, _ in raised} <= {EngineError.__name__, DeadlineError.__name__}, raised
        assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
        assert "left paused" in raised[0][1]


def test_the_group_is_reused_until_a_worker_restarts(engine: ToyEngine, other: ToyEngine) -> None:
    with Pusher([HttpEngine(engine.url), HttpEngine(other.url)], deadline_s=time_limit(30), **GROUP) as pusher:
        names = []
        for version in range(4):
            pusher.push(ToyTrainee(version), version=version)
            group = pusher._sender.group
            assert group is not None
            names.append(group.name)
            if version == 1:
                other.fault(0, "forget")  # as if it had been restarted
        assert names[0] == names[1] != names[2] == names[3]
        assert other.look()["digests"] == expected_digests(3, 2)


def test_resources_do_not_grow(engine: ToyEngine) -> None:
    push_and_look(0, 1, [engine.url], [31, 32], GROUP)
    engine_before, before = held_by(engine), held_now()
    for version in (33, 34, 35):
        push_and_look(0, 1, [engine.url], [version], GROUP)
    assert left_since(before, turns=3) == []
    wait_until_it_holds_at_most(engine, engine_before)


def test_a_shared_chunk_leaves_its_sender_once(engine: ToyEngine, other: ToyEngine) -> None:
    ((report, digests),) = push_and_look(0, 1, [engine.url, other.url], [7], WIDE)
    assert digests == [expected_digests(7, 2)] * 2
    requested = sum(worker.requested for worker in report.workers)
    (written,) = report.written
    assert all(worker.sent == worker.requested for worker in report.workers)
    assert report.engine_bytes <= written < 1.02 * report.engine_bytes < 0.6 * requested
    ((plain, _),) = push_and_look(0, 1, [engine.url, other.url], [8], RING)
    assert sum(plain.written) == requested


def test_device_digests_detect_damage() -> None:
    generator = torch.Generator().manual_seed(0)
    for nbytes in (1, 7, 8, 9, 4096, 4101):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        known = int(digest_on_device(data))
        assert int(digest_on_device(torch.cat([data, data])[nbytes:])) == known  # wherever it lies
        assert int(digest_on_device(torch.cat([data, data.new_zeros(1)]))) != known
        for at in {0, nbytes // 2, nbytes - 1}:
            damaged = data.clone()
            damaged[at] ^= 1 << (at % 8)
            assert int(digest_on_device(damaged)) != known
        if nbytes > 16:
            assert int(digest_on_device(data.roll(8))) != known


@settings(max_examples=examples(50, 50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 8, 12, 64, 4096]), st.integers(0, 2)), max_size=12))
def test_digests_of_adjacent_chunks_are_those_of_each_chunk(cuts: list[tuple[int, int]]) -> None:
    memory = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    chunks, at = [], 0
    for nbytes, gap in cuts:
        at += 4 * gap
        chunks.append(memory[at : at + nbytes].clone() if gap == 2 else memory[at : at + nbytes])
        at += nbytes
    assert word_digests(chunks) == [int(digest_on_device(chunk)) % (1 << 64) for chunk in chunks]


def test_both_ends_must_use_the_same_digest(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that uses the host digest refuses a sender that uses the device digest."""
    write = GroupTransport.write

    def with_device_digest(self: GroupTransport, chunks: Sequence[OutgoingChunk]) -> None:
        digests = word_digests([chunk.data for chunk in chunks])
        write(self, [chunk._replace(digest=digest) for chunk, digest in zip(chunks, digests, strict=True)])

    monkeypatch.setattr(GroupTransport, "write", with_device_digest)
    with pytest.raises(CorruptionError, match="did not arrive as it was sent"):
        push_and_look(0, 1, [engine.url], [9], WIDE)
    monkeypatch.undo()
    _push(engine, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_for_nccl(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StateError, match="an nccl group needs a CUDA device in each process, and this process has none"
    ):
        Pusher(HttpEngine(engine.url), group="nccl")
    with pytest.raises(UsageError, match="is gloo or nccl, not 'mpi'"):
        Pusher(HttpEngine(engine.url), group="mpi")  # type: ignore[arg-type]
    monkeypatch.setattr(pusher_module, "check_backend", lambda backend: None)
    _push(engine, 1)
    with pytest.raises(StateError, match=r"worker 0 of .*: an nccl group needs a CUDA device"):
        push_and_look(0, 1, [engine.url], [9], {"group": "nccl"})
    monkeypatch.undo()
    _push(engine, 3)


def test_waiting_for_nccl_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member ended after all had met. The stand-in for NCCL waits, as NCCL does."""
    ended = threading.Event()

    class Connecting:
        class Options:
            pass

        def __init__(self, *_: Any) -> None:
            pass

        def eager_connect_single_device(self, device: torch.device) -> None:
            ended.wait()

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Connecting, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    gathering = GroupRendezvous("nccl", 0.5)
    with pytest.raises(EngineError, match=r"cannot join the group of 1 members .* NCCL took longer than 0\.5 s"):
        join_group(gathering.address([""], [], []), 0)
    ended.set()
    assert join_group(gathering.address([""], [], []), 0).device == torch.device("cuda", 0)


def test_joins_cannot_use_a_group(engine: ToyEngine, other: ToyEngine) -> None:
    with (
        Pusher(HttpEngine(engine.url), **WIDE) as pusher,
        pytest.raises(StateError, match="cannot send to others over a group"),
    ):
        pusher.push(HttpEngine(other.url))
