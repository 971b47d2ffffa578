"""Requests to an engine that does not pause, or answers too late, never make it serve inconsistent weights."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import BytecheckpointError, DeadlineError, EngineError
from bytecheckpoint.inference.push.commit import EngineCommit
from bytecheckpoint.inference.push.engines.base import Budget, Engine
from bytecheckpoint.inference.push.messages import encode

MESSAGE = {"transaction": "t", "version": 2}


class Recorded(Engine):
    """An engine with one worker that applies every version."""

    name = "the engine"

    def __init__(self, *, pauses: bool = True) -> None:
        self.pauses = pauses
        self.calls: list[str] = []

    def call(self, request: str, timeout_s: float) -> list[str]:
        self.calls.append("call")
        return [encode({"version": 2, "inconsistent_reason": "", "applied_by": "t", "transaction": "t"})]

    def pause(self, timeout_s: float) -> None:
        self.calls.append("pause")
        if not self.pauses:
            raise DeadlineError("requests never end")

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self.calls.append("resume")


def _apply(engine: Engine, *, was_inconsistent: bool = False, is_abandoned: bool = False) -> BytecheckpointError | None:
    commit = EngineCommit(engine, MESSAGE, "", was_inconsistent, lambda: is_abandoned)
    return commit.load("stream", Budget(1.0)) or commit.finish(Budget(1.0))


def test_an_engine_resumes_after_applying() -> None:
    engine = Recorded()
    assert _apply(engine) is None
    assert engine.calls == ["pause", "call", "resume"]


def test_an_engine_that_answers_after_the_push_was_abandoned_stays_paused() -> None:
    """The next push may have begun, and must not find the engine running while it changes weights."""
    engine = Recorded()
    error = _apply(engine, is_abandoned=True)
    assert "it is left paused" in str(error)
    assert engine.calls == ["pause", "call"]


@pytest.mark.parametrize("was_inconsistent", [False, True])
def test_an_engine_that_cannot_pause_is_resumed_unless_it_was_inconsistent(was_inconsistent: bool) -> None:
    engine = Recorded(pauses=False)
    assert isinstance(_apply(engine, was_inconsistent=was_inconsistent), DeadlineError)
    assert engine.calls == (["pause"] if was_inconsistent else ["pause", "resume"])


def test_engines_that_cannot_be_reached_by_a_worker_resume_after_an_interrupt() -> None:
    engine = Recorded()
    commit = EngineCommit(engine, MESSAGE, "")
    assert commit.load("apply", Budget(1.0)) is None
    commit.interrupt(is_complete=False)
    assert engine.calls == ["pause", "call", "call", "call", "resume"]
    assert isinstance(commit.undo(Budget(1.0)), EngineError)  # it serves the version that it reverts to
