"""Requests to an engine that does not pause, answers too late, or is in another push, never make it serve inconsistent
weights."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bytecheckpoint.errors import BytecheckpointError, DeadlineError, StateError
from bytecheckpoint.inference.push import commit
from bytecheckpoint.inference.push.commit import EngineCommit
from bytecheckpoint.inference.push.engines.base import Budget, Engine
from bytecheckpoint.inference.push.leases import HeldLease, resolve
from bytecheckpoint.inference.push.messages import decode, encode

MESSAGE = {"transaction": "t", "version": 2}
ANSWERS = [{"receiver": "", "left_paused": False}]
LONG_S = 100.0


class Recorded(Engine):
    """An engine with one worker that applies every version, and cannot revert. ``late`` requests are not answered in
    time. ``waits`` has the limits of the waits, by request."""

    name = "the engine"

    def __init__(self, *, pauses: bool = True, late: str = "", transaction: str = "t") -> None:
        self.pauses, self.late, self.transaction = pauses, late, transaction
        self.calls: list[str] = []
        self.fails_to_apply = False
        self.waits: dict[str, float] = {}
        self.answer: dict[str, Any] = {"version": 2, "inconsistent_reason": "", "applied_by": "t", "is_changing": False}

    def call(self, request: str, timeout_s: float) -> list[str]:
        kind = decode(request)["kind"]
        self.calls.append(kind)
        self.waits[kind] = timeout_s
        if kind == self.late:
            raise DeadlineError(f"{kind} takes too long")
        answer = {**self.answer, "transaction": self.transaction, "has_begun": True, "has_sender": False}
        if kind == "apply" and self.fails_to_apply:
            failure = {"kind": "EngineError", "message": "no", "faults": [], "traceback_text": "", "serving": ""}
            answer |= {"failure": failure, "pid": 1, "host": "h"}
        return [encode(answer)]

    def pause(self, timeout_s: float) -> None:
        self.calls.append("pause")
        if not self.pauses:
            raise DeadlineError("requests never end")

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self.calls.append("resume")


def _loaded(engine: Engine) -> EngineCommit:
    commit = EngineCommit(engine, ANSWERS, MESSAGE)
    assert commit.load("apply", Budget(LONG_S)) is None
    return commit


def _apply(engine: Engine, *, is_abandoned: bool = False) -> BytecheckpointError | None:
    commit = EngineCommit(engine, ANSWERS, MESSAGE, lambda: is_abandoned)
    return commit.load("stream", Budget(1.0)) or commit.finish(Budget(1.0))


def test_an_engine_resumes_after_applying() -> None:
    engine = Recorded()
    assert _apply(engine) is None
    assert engine.calls == ["lease", "pause", "stream", "status", "resume", "end_lease"]


def test_an_engine_that_answers_after_the_push_was_abandoned_stays_paused() -> None:
    """The next push may have begun, and must not find the engine running while it changes weights."""
    engine = Recorded()
    error = _apply(engine, is_abandoned=True)
    assert "it is left paused" in str(error)
    assert engine.calls == ["lease", "pause", "stream"]


@pytest.mark.parametrize("was_inconsistent", [False, True])
def test_an_engine_that_cannot_pause_is_resumed_unless_it_was_inconsistent(was_inconsistent: bool) -> None:
    engine = Recorded(pauses=False)
    engine.answer["inconsistent_reason"] = "it broke" if was_inconsistent else ""
    assert isinstance(_apply(engine), DeadlineError)
    assert engine.calls == ["lease", "pause", "status", *([] if was_inconsistent else ["resume", "end_lease"])]


@pytest.mark.parametrize("pauses", [True, False])
def test_an_engine_that_another_push_has_paused_is_left_alone(pauses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after this process was stopped, and the next push did not wait for it."""
    monkeypatch.setattr(commit, "_CLEANUP_S", 0.1)
    engine = Recorded(pauses=pauses, transaction="another")
    engine.answer["is_changing"] = True
    assert "another push into the engine has begun" in str(_apply(engine))
    assert "resume" not in engine.calls


def test_an_engine_that_does_not_accept_a_lease_is_not_touched() -> None:
    class Addressed(Recorded):
        address = {"url": "http://127.0.0.1:1"}

    engine = Addressed(late="lease")
    assert isinstance(_apply(engine), DeadlineError)
    assert engine.calls == ["lease"]


def test_a_lease_may_last_longer_than_the_wait_for_it() -> None:
    class Addressed(Recorded):
        address = {"url": "http://127.0.0.1:1"}

    engine = Addressed(late="lease")
    with pytest.raises(DeadlineError):
        HeldLease(engine, "t", "", 2 * LONG_S, LONG_S)
    assert engine.waits["lease"] == LONG_S


def test_an_interrupt_waits_as_long_as_the_stage_may_last(caplog: pytest.LogCaptureFixture) -> None:
    """Requests of the push come first, in which the workers may load."""
    engine = Recorded()
    commit = _loaded(engine)
    commit.interrupt(Budget(LONG_S), is_complete=False, is_alone=True)
    assert engine.calls == [
        "lease",
        "pause",
        "apply",
        "revert",
        "resolve",
        "status",
        "resume",
        "end_lease",
        "end_lease",
    ]
    assert min(engine.waits[kind] for kind in ("revert", "resolve", "status")) > LONG_S / 2


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_interrupt_leaves_no_engine_with_a_version_that_others_do_not_have(
    is_complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Recorded()
    commit = _loaded(engine)
    with caplog.at_level(logging.ERROR):
        commit.interrupt(Budget(LONG_S), is_complete=is_complete, is_alone=False)
    assert ("resume" in engine.calls) is is_complete
    assert ("cannot return to the one before" in caplog.text) is not is_complete


def test_an_engine_that_cannot_revert_stays_paused() -> None:
    engine = Recorded()
    error = _loaded(engine).undo(Budget(LONG_S))
    assert "the engine has version 2 and cannot return to the one before, so it is left paused" in str(error)
    assert "resume" not in engine.calls


def test_a_version_of_the_same_name_is_another_one() -> None:
    engine = Recorded()
    commit = _loaded(engine)
    engine.answer["applied_by"] = "an earlier push"
    assert commit.undo(Budget(LONG_S)) is None
    assert engine.calls[-2:] == ["resume", "end_lease"]


@pytest.mark.parametrize("load_fails", [True, False])
def test_an_engine_that_reverts_too_slowly_is_left_to_its_worker(
    load_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be healthy: to end the lease would leave it paused."""
    ended: list[str] = []
    monkeypatch.setattr(HeldLease, "end", lambda lease, wait_s, has_resumed: ended.append("properly"))
    monkeypatch.setattr(HeldLease, "lose", lambda lease, revert: ended.append("lost"))
    engine = Recorded(late="revert")
    one = EngineCommit(engine, ANSWERS, MESSAGE)
    engine.fails_to_apply = load_fails
    error = one.load("apply", Budget(LONG_S)) or one.undo(Budget(LONG_S))
    assert "it is unknown what the engine serves now; it is left paused" in str(error)
    assert "the next push resumes it" in str(error)
    assert ended == ["lost"]
    assert "resume" not in engine.calls


def test_a_push_that_begins_while_another_one_is_ended_keeps_its_pause() -> None:
    class Overtaken(Recorded):
        def call(self, request: str, timeout_s: float) -> list[str]:
            if decode(request)["kind"] == "status":
                self.transaction = "another"
            return super().call(request, timeout_s)

    engine = Overtaken()
    with pytest.raises(StateError, match="another push into the engine has begun"):
        resolve(engine, LONG_S, "t")
    assert engine.calls == ["resolve", "status"]
