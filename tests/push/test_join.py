"""Joins: other engines get the version of an engine that was pushed to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from join_probes import arenas, giving, held_by, until, wait_until_it_holds_at_most
from leak_watch import held_now, left_since
from toy_blocks import block_digests
from toy_engine import ToyEngine, ToyTrainee, digest_of, expected_digests, toy_engine

from bytecheckpoint.errors import MismatchError, StateError
from bytecheckpoint.inference.push import HttpEngine, Pusher, PushReport, joins, writing
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(7, of=__name__)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, ToyEngine]]:
    """Engines by name: one worker, two workers, and two other workers."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(toy_engine(tp)) for name, tp in (("one", 1), ("two", 2), ("other", 2))}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


def _push(engine: ToyEngine, version: int, **options: Any) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **options) as pusher:
        pusher.push(ToyTrainee(version), version=version)


def _release(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.release()


def _join(holder: ToyEngine, *engines: ToyEngine, release: bool = False, **options: Any) -> PushReport:
    with Pusher([HttpEngine(engine.url) for engine in engines], deadline_s=time_limit(30), **options) as pusher:
        report = pusher.push(HttpEngine(holder.url))
        if release:
            pusher.release()
        return report


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("holder", ["one", "two"])
def test_every_worker_gets_its_part(engines: dict[str, ToyEngine], holder: str, tcp: bool) -> None:
    version = 1 + 2 * tcp + (holder == "one")
    joining_engines = [engine for name, engine in engines.items() if name != holder]
    # One sends in smaller chunks than the other holds, and vice versa.
    sizes = (3000, 5000) if tcp else (5000, 3000)
    _push(engines[holder], version, chunk_bytes=sizes[0])
    report = _join(engines[holder], *joining_engines, chunk_bytes=sizes[1], tcp_only=tcp)
    assert report.version == version
    for engine in engines.values():
        digests = engine.look()["digests"]
        assert digests == expected_digests(version, len(digests))
    assert report.written == [sum(worker.sent for worker in report.workers)]
    assert [worker.sent for worker in report.workers] == [worker.requested for worker in report.workers]
    assert not any(engine.paused for engine in engines.values())


def test_an_engine_that_joined_can_be_a_holder_and_be_pushed_to(engines: dict[str, ToyEngine]) -> None:
    one, two, other = engines.values()
    _push(two, 10)
    _join(two, one)
    report = _join(one, other)
    assert report.version == 10
    assert other.look()["digests"] == expected_digests(10, 2)
    with Pusher(HttpEngine(other.url), deadline_s=time_limit(30)) as pusher:
        assert [worker.sent for worker in pusher.push(ToyTrainee(10), version=11).workers] == [0, 0]
        pusher.push(ToyTrainee(12), version=12)
        # Between pushes of a job, and under another version name.
        assert pusher.push(HttpEngine(one.url), version="ten").version == "ten"
        assert pusher.push(ToyTrainee(13), version=13).version == 13
    assert other.look()["digests"] == expected_digests(13, 2)


def test_an_engine_with_another_dtype(engines: dict[str, ToyEngine]) -> None:
    _push(engines["two"], 20)
    with toy_engine(1, "bfloat16") as short, toy_engine(2, "bfloat16") as another:
        _join(engines["two"], short)
        assert short.look()["digests"] == expected_digests(20, 1, torch.bfloat16)
        _join(short, another)
        assert another.look()["digests"] == expected_digests(20, 2, torch.bfloat16)
        _push(engines["one"], 21)
        with Pusher(HttpEngine(engines["one"].url), deadline_s=time_limit(30)) as pusher:
            with pytest.raises(
                MismatchError, match=r"q\.weight: float32 is requested of float32, it has bfloat16"
            ) as raised:
                pusher.push(HttpEngine(short.url))
            assert "'scale'" not in str(raised.value)  # the loader reads its value, so it was sent in its own dtype
            assert engines["one"].look()["digests"] == expected_digests(21, 1)
            pusher.push(HttpEngine(short.url), strict=False)
    rounded = ToyTrainee(20)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name != "scale":
                parameter.copy_(parameter.to(torch.bfloat16))
    assert engines["one"].look()["digests"] == [digest_of(rounded, 1, 0)]


def test_engines_of_8_bits(engines: dict[str, ToyEngine]) -> None:
    """Each of two workers holds complete blocks of 16 rows, but not of 64."""
    two = engines["two"]
    _push(two, 25)
    with toy_engine(2, blocks=(16, 16)) as narrow, toy_engine(1, blocks=(16, 16)) as other:
        _join(two, narrow)
        assert narrow.look()["digests"] == block_digests(ToyTrainee(25), 2, (16, 16))
        _join(narrow, other)
        assert other.look()["digests"] == block_digests(ToyTrainee(25), 1, (16, 16))
        with pytest.raises(MismatchError):
            _join(other, two)
    with toy_engine(1, blocks=(64, 24)) as cut:
        _join(two, cut)
        assert cut.look()["digests"] == block_digests(ToyTrainee(25), 1, (64, 24))
    assert two.look()["digests"] == expected_digests(25, 2)


def _join_in_step(rank: int, world_size: int, holder: str, engine: str, deadline_s: float = time_limit(30)) -> Any:
    with Pusher(HttpEngine(engine) if rank == 0 else None, deadline_s=deadline_s) as pusher:
        return pusher.push(HttpEngine(holder) if rank == 0 else HttpEngine("http://unused"))


def test_a_join_of_a_job_with_several_ranks(engines: dict[str, ToyEngine], pool: RankPool) -> None:
    _push(engines["two"], 30)
    first, second = pool.run(_join_in_step, engines["two"].url, engines["one"].url)
    assert first == second
    assert first.version == 30
    assert engines["one"].look()["digests"] == expected_digests(30, 1)


def _differ(rank: int, world_size: int, holder: str, engine: str, first: int) -> None:
    with Pusher(HttpEngine(engine), deadline_s=time_limit(20)) as pusher:
        with pytest.raises(StateError, match="ranks push different versions"):
            pusher.push(HttpEngine(holder) if rank == first else ToyTrainee(1))


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_push_different_things(engines: dict[str, ToyEngine], pool: RankPool, first: int) -> None:
    pool.run(_differ, engines["two"].url, engines["one"].url, first)


def test_the_holder_answers_while_it_sends(engines: dict[str, ToyEngine]) -> None:
    one, two, _ = engines.values()
    _push(two, 40)
    with ThreadPoolExecutor(1) as threads, giving(two) as begun:
        join = threads.submit(_join, two, one, tcp_only=True)
        begun(join)
        assert two.look()["digests"] == expected_digests(40, 2)
        assert not join.done()
    assert join.result().version == 40
    assert one.look()["digests"] == expected_digests(40, 1)


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 40_000, "chunk_bytes": 4000}], ids=["double", "streamed"])
def test_pushes_into_the_holder_while_it_sends(engines: dict[str, ToyEngine], options: dict[str, Any]) -> None:
    """The second push would reuse the memory that is being read; a streamed one releases it."""
    one, two, _ = engines.values()
    _release(one)
    _push(two, 50)
    with ThreadPoolExecutor(1) as threads, giving(two) as begun:
        join = threads.submit(_join, two, one, chunk_bytes=1000, tcp_only=True)
        begun(join)
        with Pusher(HttpEngine(two.url), deadline_s=time_limit(30), **options) as pusher:
            for version in (51, 52):
                report = pusher.push(ToyTrainee(version), version=version)
        assert report.mode == ("streamed" if options else "double")
        assert two.look()["digests"] == expected_digests(52, 2)
    assert join.result().version == 50
    assert one.look()["digests"] == expected_digests(50, 1)
    if not options:
        assert _join(two, one).version == 52
        assert one.look()["digests"] == expected_digests(52, 1)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_join_is_streamed_when_memory_is_short(engines: dict[str, ToyEngine], tcp: bool) -> None:
    one, two, _ = engines.values()
    _push(two, 55 + tcp)
    report = _join(two, one, memory_bytes=40_000, chunk_bytes=4000, tcp_only=tcp)
    assert report.mode == "streamed"
    assert one.look()["digests"] == expected_digests(55 + tcp, 1)
    assert not one.paused
    with pytest.raises(StateError, match=r"has no bytes to send, .* memory was released or is short"):
        _join(one, two)


def test_memory_that_is_read_in_place_while_the_holder_is_pushed_to(
    engines: dict[str, ToyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while the holder releases its memory."""
    one, _, other = engines.values()
    _release(one)
    _push(one, 53)
    read, endings = joins.EngineSource.fetch, iter((_push, _release))

    def after_another_push(source: joins.EngineSource, *arguments: Any) -> Any:
        end = next(endings, None)
        if end is _push:
            for version in (54, 56, 57):
                _push(one, version)
        elif end is _release:
            _release(one)
        return read(source, *arguments)

    monkeypatch.setattr(joins.EngineSource, "fetch", after_another_push)
    monkeypatch.setattr(writing, "_BATCH_BYTES", 40_000)
    monkeypatch.setattr(writing, "_RUN_BYTES", 10_000)
    assert _join(one, other).version == 53
    assert other.look()["digests"] == expected_digests(53, 2)
    assert next(endings, None) is None


def test_several_joins_at_once(engines: dict[str, ToyEngine]) -> None:
    one, two, other = engines.values()
    _push(two, 60)
    with ThreadPoolExecutor(2) as threads, giving(two, joins=2) as begun:
        joins = [threads.submit(_join, two, engine, tcp_only=True) for engine in (one, other)]
        begun()
    assert [join.result().version for join in joins] == [60, 60]
    assert one.look()["digests"] == expected_digests(60, 1)
    assert other.look()["digests"] == expected_digests(60, 2)


@pytest.mark.parametrize("tcp", [False, True])
def test_ten_joins_leak_nothing(engines: dict[str, ToyEngine], tcp: bool) -> None:
    one, two, _ = engines.values()
    _push(two, 70)

    def join() -> list[list[int]]:
        _join(two, one, release=True, tcp_only=tcp)
        until(lambda: max(two.look()["threads"]) == 1, "its threads have ended")
        return [arenas(engine) for engine in (one, two)]

    mapped = join()
    of_engines, before = [held_by(engine) for engine in (one, two)], held_now()
    assert [join() for _ in range(9)] == [mapped] * 9
    assert left_since(before, turns=9) == []
    for engine, held in zip((one, two), of_engines, strict=True):
        wait_until_it_holds_at_most(engine, held)


def test_no_tensor_bytes_pass_through_the_rpc_of_engines(
    engines: dict[str, ToyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = engines.values()
    _push(two, 80)
    before = held_now()
    results = []

    def listening(engine: HttpEngine, request: str, timeout_s: float) -> list[str]:
        answers = call(engine, request, timeout_s)
        results.append(len(request) + sum(map(len, answers)))
        return answers

    call = HttpEngine.call
    monkeypatch.setattr(HttpEngine, "call", listening)
    report = _join(two, one)
    assert sum(results) < 0.2 * report.workers[0].sent
    assert left_since(before) == []
