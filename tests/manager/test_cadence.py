"""When a save is due, and when the ranks meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import StateError
from bytecheckpoint.manager.cadence import Cadence, Pace


def test_by_steps() -> None:
    cadence = Cadence(3, None, now=0.0)
    assert [step for step in range(1, 10) if cadence.is_due_at(step)] == [3, 6, 9]
    assert not cadence.is_due_by(1e9)


def test_by_time_since_the_last_save_began() -> None:
    cadence = Cadence(None, 0.5, now=100.0)
    assert not cadence.is_due_at(0)
    assert not cadence.is_due_by(129.9)
    assert cadence.is_due_by(130.0)
    cadence.began(130.0)
    assert not cadence.is_due_by(159.9)


@pytest.mark.parametrize("arguments", [(0, None), (-1, None), (1.5, None), (None, 0), (None, float("nan"))])
def test_what_means_nothing(arguments: tuple[int | None, float | None]) -> None:
    with pytest.raises(StateError, match="every_"):
        Cadence(*arguments, now=0.0)


def test_the_pace_follows_the_turns() -> None:
    pace = Pace(2.0)
    assert pace.turns_to_next(1, now=50.0) == 1  # nothing is known yet
    assert pace.turns_to_next(2, now=50.5) == 4
    assert pace.turns_to_next(6, now=52.5) == 4
    assert pace.turns_to_next(10, now=72.5) == 1  # turns became slow


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e6)), min_size=1))
def test_there_is_always_a_next_meeting_not_too_far_away(turns: list[tuple[int, float]]) -> None:
    pace, turn, now = Pace(2.0), 1, 0.0
    for more, seconds in turns:
        assert 1 <= pace.turns_to_next(turn, now) <= 10_000
        turn, now = turn + more, now + seconds
