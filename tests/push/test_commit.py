"""Requests to an engine that does not pause, or answers too late, never make it serve inconsistent weights."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import BytecheckpointError, DeadlineError
from bytecheckpoint.inference.push.commit import apply_on
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
        return [encode({"version": 2, "inconsistent_reason": "", "applied_by": "t"})]

    def pause(self, timeout_s: float) -> None:
        self.calls.append("pause")
        if not self.pauses:
            raise DeadlineError("requests never end")

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self.calls.append("resume")


def _apply(engine: Engine, *, was_inconsistent: bool = False, is_abandoned: bool = False) -> BytecheckpointError | None:
    return apply_on(
        engine, MESSAGE, 2, Budget(1.0), "stream", was_inconsistent=was_inconsistent, is_abandoned=lambda: is_abandoned
    )


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
