"""The pause of a push is ended by its own sender, the engine's worker or ``resume``, and by no other push."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from join_probes import until
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint import telemetry
from bytecheckpoint.errors import EngineError, StateError
from bytecheckpoint.inference.push import HttpEngine, Pusher, commit
from bytecheckpoint.inference.push.engines.base import ask
from bytecheckpoint.inference.push.leases import resolve
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(6, of=__name__)

STAGES = [("push.apply.leased", "point"), ("push.apply.paused", "point"), ("push.apply.loaded", "point")]
EARLY_STAGES = [("push.write", "enter"), ("push.verify", "enter"), ("push.verify", "exit")]


@pytest.fixture(scope="module")
def shared() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.fixture
def engine(shared: ToyEngine) -> ToyEngine:
    """Serves version 1."""
    _push(shared, 1)
    return shared


def _pusher(engine: ToyEngine) -> Pusher:
    return Pusher(HttpEngine(engine.url), deadline_s=time_limit(30))


def _push(engine: ToyEngine, version: int) -> None:
    with _pusher(engine) as pusher:
        pusher.push(ToyTrainee(version), version=version)


def _assert_serves(engine: ToyEngine, version: int) -> None:
    digests = engine.look()["digests"]
    assert digests == expected_digests(version, len(digests))
    assert not engine.paused


def _resumes(engine: ToyEngine) -> int:
    return int(engine.look()["log"].count("/resume"))


@contextmanager
def _once_at(stage: tuple[str, str], do: Callable[[], Any]) -> Iterator[list[Any]]:
    """Call ``do`` when a push first passes a point of its trace. Yields a list to which its result is added."""
    found: list[Any] = []

    def observe(*seen: str) -> None:
        if seen == stage and not found:
            found.append(None)
            found[0] = do()

    remove = telemetry.observe(observe)
    try:
        yield found
    finally:
        remove()


def _resume(engine: ToyEngine) -> Any:
    with _pusher(engine) as pusher:
        try:
            return pusher.resume()
        except StateError as error:
            return error


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_push_that_changes_weights_refuses_to_be_ended(engine: ToyEngine, stage: tuple[str, str]) -> None:
    before = _resumes(engine)
    with _once_at(stage, lambda: _resume(engine)) as refused:
        _push(engine, 2)
    assert "its sender is alive; nothing was changed" in str(refused[0])
    assert _resumes(engine) == before + 1
    _assert_serves(engine, 2)


@pytest.mark.parametrize("stage", EARLY_STAGES, ids=str)
def test_a_push_that_has_changed_nothing_goes_on_after_a_resume(engine: ToyEngine, stage: tuple[str, str]) -> None:
    with _once_at(stage, lambda: _resume(engine)) as resumed:
        _push(engine, 2)
    assert resumed == [[1]]
    _assert_serves(engine, 2)


def test_a_late_worker_does_not_end_the_pause_of_the_next_push(engine: ToyEngine) -> None:
    """Its thread ends the push before, when the next one has begun."""
    old = ask(HttpEngine(engine.url), "state", {}, time_limit(30))[0]["transaction"]

    def resolve_old() -> bool:
        with pytest.raises(StateError, match=r"another push into .* has begun"):
            resolve(HttpEngine(engine.url), time_limit(30), old)
        return engine.paused

    for stage in STAGES:
        with _once_at(stage, resolve_old) as paused:
            _push(engine, 2)
        assert paused == [stage != STAGES[0]]
        _assert_serves(engine, 2)


def test_a_late_worker_ends_its_own_pause_before_the_next_push_begins_to_change_weights(engine: ToyEngine) -> None:
    old = ask(HttpEngine(engine.url), "state", {}, time_limit(30))[0]["transaction"]
    HttpEngine(engine.url).pause(time_limit(30))
    with _once_at(("push.verify", "exit"), lambda: (resolve(HttpEngine(engine.url), 30.0, old), engine.paused)) as seen:
        _push(engine, 2)
    assert seen == [(1, False)]
    _assert_serves(engine, 2)


def test_a_late_sender_does_not_end_the_pause_of_the_next_push(engine: ToyEngine) -> None:
    """As one that was stopped after its engine had loaded."""

    before = _resumes(engine)
    with _once_at(STAGES[-1], lambda: _push(engine, 3)):
        with pytest.raises(EngineError, match=r"another push into .* has begun"):
            _push(engine, 2)
    assert _resumes(engine) == before + 1
    _assert_serves(engine, 3)


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 40_000, "chunk_bytes": 4000}], ids=["arenas", "streamed"])
def test_a_late_sender_does_not_leave_the_engine_paused(engine: ToyEngine, options: dict[str, Any]) -> None:
    """As one that was stopped before it paused the engine, until another push had ended."""
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **options) as late:
        with _once_at(STAGES[0], lambda: _push(engine, 3)):
            with pytest.raises(EngineError, match="this push is over"):
                late.push(ToyTrainee(2), version=2)
    _assert_serves(engine, 3)


def test_a_late_sender_waits_for_the_end_of_the_next_push(engine: ToyEngine) -> None:
    """It pauses the engine while the next push has done so, and resumes it afterwards."""
    may_pause, has_paused = threading.Event(), threading.Event()

    def push_next() -> Future[None]:
        def wait_for_late_pause() -> None:
            may_pause.set()
            assert has_paused.wait(time_limit(30))

        def push() -> None:
            with _once_at(STAGES[2], wait_for_late_pause):
                _push(engine, 3)

        pushing = threads.submit(push)
        assert may_pause.wait(time_limit(30))
        return pushing

    def note_refusal(*seen: str) -> None:
        if seen == ("push.apply.paused", "point") and may_pause.is_set():
            has_paused.set()

    with ThreadPoolExecutor(1) as threads, _once_at(STAGES[0], push_next) as pushing:
        remove = telemetry.observe(note_refusal)
        try:
            with pytest.raises(EngineError, match="this push is over"):
                _push(engine, 2)
        finally:
            remove()
        pushing[0].result(time_limit(30))
    _assert_serves(engine, 3)


def test_a_late_revert_reads_no_memory_into_which_the_next_push_writes(engine: ToyEngine) -> None:
    _push(engine, 2)
    old = ask(HttpEngine(engine.url), "state", {}, time_limit(30))[0]["transaction"]
    with _once_at(("push.write", "exit"), lambda: ask(HttpEngine(engine.url), "revert", {"transaction": old}, 30.0)):
        with _once_at(("push.verify", "enter"), lambda: engine.look()["digests"]) as seen:
            _push(engine, 3)
    assert seen == [expected_digests(2, 2)]
    _assert_serves(engine, 3)


def test_an_engine_that_reverts_late_resumes_by_itself(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_CLEANUP_S", 0.5)
    stopped = engine.look()["pids"][1]
    engine.fault(0, "fail", 1)
    engine.fault(1, "stop in revert")
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(3)) as pusher:
        with pytest.raises(EngineError, match="the layer does not fit") as raised:
            pusher.push(ToyTrainee(2), version=2)
    left = f"it is left paused. If its workers answer again, it resumes, or `bcp push --resume {engine.url}`"
    assert left in str(raised.value)
    os.kill(stopped, signal.SIGCONT)
    until(lambda: not engine.paused, "resumed")
    _assert_serves(engine, 1)


def _die_while_paused(rank: int, world_size: int, url: str, busy: int) -> None:
    def die() -> None:
        ToyEngine(url).fault(0, "busy", busy)
        os.kill(os.getpid(), signal.SIGKILL)

    with _once_at(("push.apply.paused", "point"), die):
        _push(ToyEngine(url), 2)


def test_a_worker_tries_again_when_a_proxy_answers(engine: ToyEngine) -> None:
    with RankPool(1) as pool:
        pool.run(_die_while_paused, engine.url, 2, expect_death={0: signal.SIGKILL})
    until(lambda: not engine.paused, "resumed")
    _assert_serves(engine, 1)


@pytest.fixture
def paused(engine: ToyEngine) -> Iterator[ToyEngine]:
    """Its owner has paused it."""
    engine.pause()
    yield engine
    engine.resume()


def _count(engine: ToyEngine, *paths: str) -> list[int]:
    log = engine.look()["log"]
    return [log.count(path) for path in paths]


def test_an_engine_that_its_owner_has_paused_stays_paused(paused: ToyEngine) -> None:
    before = _count(paused, "/pause", "/resume", "/reset_prefix_cache")
    with _pusher(paused) as pusher:
        pusher.push(ToyTrainee(2), version=2)
        pusher.push(ToyTrainee(3), version=3)
        pusher.rollback()
    assert _count(paused, "/pause", "/resume", "/reset_prefix_cache") == [before[0] + 3, before[1], before[2] + 3]
    assert paused.look()["digests"] == expected_digests(2, 2)
    paused.resume()
    _push(paused, 4)
    _assert_serves(paused, 4)


def test_only_a_pause_of_the_owner_outlasts_a_failed_push(engine: ToyEngine) -> None:
    for version, is_owners in ((2, False), (3, True), (4, False)):
        if is_owners:
            engine.pause()
        engine.fault(1, "fail", 2)
        with pytest.raises(EngineError, match="is left paused"):
            _push(engine, version)
        assert engine.paused
        _push(engine, version)
        assert engine.paused is is_owners
        engine.resume()
        _assert_serves(engine, version)


def _die_when_loaded(rank: int, world_size: int, url: str) -> None:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        at = ("push.apply.loaded", "point")
        telemetry.observe(lambda *seen: os.kill(os.getpid(), signal.SIGKILL) if seen == at else None)
        pusher.push(ToyTrainee(2), version=2)


def test_a_worker_does_not_resume_what_its_owner_has_paused(paused: ToyEngine) -> None:
    before = _count(paused, "/update_weight_version", "/resume")
    with RankPool(1) as pool:
        pool.run(_die_when_loaded, paused.url, expect_death={0: signal.SIGKILL})
        until(lambda: _count(paused, "/update_weight_version") == [before[0] + 1], "the worker has ended the push")
    assert _count(paused, "/resume") == before[1:]
    assert paused.look()["digests"] == expected_digests(2, 2)
    paused.resume()
    # A pause after that is the owner's again.
    paused.pause()
    _push(paused, 3)
    assert paused.paused
