"""What is said to an engine that pauses badly, or answers too late: nothing that makes it serve torn weights."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import BytecheckpointError, DeadlineError
from bytecheckpoint.inference.push.committing import apply_on
from bytecheckpoint.inference.push.engines import Budget, Engine
from bytecheckpoint.inference.push.messages import encode

MESSAGE = {"transaction": "t", "version": 2}


class Recorded(Engine):
    """One worker that puts in what it is told to."""

    name = "the engine"

    def __init__(self, *, pauses: bool = True) -> None:
        self.pauses = pauses
        self.heard: list[str] = []

    def call(self, request: str, timeout_s: float) -> list[str]:
        self.heard.append("call")
        return [encode({"version": 2, "torn": "", "put_in_by": "t"})]

    def pause(self, timeout_s: float) -> None:
        self.heard.append("pause")
        if not self.pauses:
            raise DeadlineError("requests go on for ever")

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self.heard.append("resume")


def _apply(engine: Engine, *, was_torn: bool = False, given_up: bool = False) -> BytecheckpointError | None:
    return apply_on(engine, MESSAGE, 2, Budget(1.0), "stream", was_torn=was_torn, given_up=lambda: given_up)


def test_an_engine_that_puts_in_goes_on() -> None:
    engine = Recorded()
    assert _apply(engine) is None
    assert engine.heard == ["pause", "call", "resume"]


def test_one_that_answers_when_it_was_given_up_stays_paused() -> None:
    """The next push may have begun, and would find it going on in the middle of its own change."""
    engine = Recorded()
    error = _apply(engine, given_up=True)
    assert "it is left paused" in str(error)
    assert engine.heard == ["pause", "call"]


@pytest.mark.parametrize("was_torn", [False, True])
def test_one_that_does_not_pause_goes_on_unless_it_was_torn(was_torn: bool) -> None:
    engine = Recorded(pauses=False)
    assert isinstance(_apply(engine, was_torn=was_torn), DeadlineError)
    assert engine.heard == (["pause"] if was_torn else ["pause", "resume"])
