"""``Cadence``, ``Retention`` and ``Preemption``: what they accept; and how many turns rounds are apart."""

from __future__ import annotations

import signal
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint import Cadence, Preemption, Retention
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.coordinator import RoundTimer


def test_defaults() -> None:
    assert Cadence() == Cadence(every_steps=None, every_minutes=None, continuous=False, signals=())
    assert Retention() == Retention(last=None, last_hours=None, every_steps=None, best=None, metric=None, mode="min")
    assert Preemption() == Preemption(signals=(signal.SIGTERM,), grace_s=30.0, action="exit")


@pytest.mark.parametrize("kind", [Cadence, Retention, Preemption])
def test_options_are_frozen_and_keyword_only(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(FrozenInstanceError):
        kind().signals = ()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Cadence, {"every_steps": 0}, "Cadence.every_steps must be a whole number of at least 1, not 0"),
        (Cadence, {"every_steps": 1.5}, "Cadence.every_steps must be"),
        (Cadence, {"every_minutes": 0}, "Cadence.every_minutes must be a positive number, not 0"),
        (Cadence, {"every_minutes": float("nan")}, "Cadence.every_minutes must be"),
        (Cadence, {"continuous": 1}, "Cadence.continuous must be True or False, not 1"),
        (Retention, {"last_hours": 0}, "Retention.last_hours must be a positive number, not 0"),
        *((Retention, {rule: value}, f"Retention.{rule} must be a whole number of at least 1, not {value}")
          for rule in ("last", "every_steps", "best") for value in (0, -1, 1.5, True)),
        (Retention, {"best": 2}, "must be set together"),
        (Retention, {"metric": "loss"}, "must be set together"),
        (Retention, {"best": 1, "metric": "x", "mode": "less"}, "Retention.mode must be one of min, max, not 'less'"),
        (Preemption, {"grace_s": 0}, "Preemption.grace_s must be a number of seconds between 0 and 900, not 0"),
        (Preemption, {"grace_s": 30_000}, "Preemption.grace_s must be"),
        (Preemption, {"grace_s": "30"}, "Preemption.grace_s must be"),
        (Preemption, {"action": "die"}, "Preemption.action must be one of exit, return, not 'die'"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_options(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**arguments)
    assert message in str(caught.value)


def test_rounds_follow_the_speed_of_the_loop() -> None:
    timer = RoundTimer(2.0)
    assert timer.turns_to_next(1, now=50.0) == 1  # the speed is unknown
    assert timer.turns_to_next(2, now=50.5) == 4
    assert timer.turns_to_next(6, now=52.5) == 4
    assert timer.turns_to_next(10, now=72.5) == 1  # turns became slow


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e6)), min_size=1))
def test_the_next_round_is_never_too_far_away(turns: list[tuple[int, float]]) -> None:
    timer, turn, now = RoundTimer(2.0), 1, 0.0
    for more, seconds in turns:
        assert 1 <= timer.turns_to_next(turn, now) <= 10_000
        turn, now = turn + more, now + seconds
