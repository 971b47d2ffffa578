"""The states of a push on a worker: each request has its turn, and there is no other way to change the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bytecheckpoint.errors import EngineError, StateError
from bytecheckpoint.inference.push.lifecycle import PushLifecycle, PushState

REQUESTS = ("join_group", "verify", "apply", "stream")
STEPS: dict[str, Callable[[PushLifecycle], None]] = {
    "receive": lambda push: push.move(PushState.RECEIVING),
    "verify": lambda push: push.move(PushState.VERIFIED),
    "change": PushLifecycle.change,
    "apply": lambda push: push.move(PushState.APPLIED),
    "end": PushLifecycle.end,
}


def _after(*steps: str) -> PushLifecycle:
    push = PushLifecycle()
    push.begin("a")
    for step in steps:
        STEPS[step](push)
    return push


def _accepted(push: PushLifecycle) -> set[str]:
    found = set()
    for request in REQUESTS:
        try:
            push.check(request, "a")
            found.add(request)
        except (EngineError, StateError):
            pass
    return found


@pytest.mark.parametrize(
    ("steps", "state", "accepted", "has_begun"),
    [
        ((), PushState.IDLE, set(), False),
        (("receive",), PushState.RECEIVING, {"join_group", "verify", "stream"}, False),
        (("receive", "verify"), PushState.VERIFIED, {"apply"}, False),
        (("receive", "verify", "change"), PushState.APPLYING, {"apply"}, True),
        (("receive", "change"), PushState.STREAMING, {"stream"}, True),
        (("receive", "change", "apply"), PushState.APPLIED, set(), True),
        (("receive", "verify", "change", "change", "apply"), PushState.APPLIED, set(), True),
        (("receive", "verify", "change", "end"), PushState.ENDED, set(), True),
        (("receive", "change", "apply", "end", "end"), PushState.ENDED, set(), True),
        (("receive", "verify", "end"), PushState.VERIFIED, {"apply"}, False),
    ],
)
def test_requests_are_accepted_by_state(
    steps: tuple[str, ...], state: PushState, accepted: set[str], has_begun: bool
) -> None:
    push = _after(*steps)
    assert push.state is state
    assert _accepted(push) == accepted
    assert push.has_begun == has_begun
    with pytest.raises(EngineError, match="this push is over"):
        push.check("apply", "b")
    push.begin("b")
    assert push.state is PushState.IDLE
    assert _accepted(push) == set()


def test_a_request_that_is_not_its_turn_names_the_state() -> None:
    with pytest.raises(StateError, match="'apply' is not its turn: the push is receiving"):
        _after("receive").check("apply", "a")


@pytest.mark.parametrize("steps", [("verify",), ("receive", "apply"), ("receive", "verify", "apply"),
                                   ("receive", "change", "verify"), ("receive", "receive")])  # fmt: skip
def test_other_transitions_are_refused(steps: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="a push cannot go from"):
        _after(*steps)
