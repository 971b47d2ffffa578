"""Which checkpoints may go."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import StateError
from bytecheckpoint.manager.retention import Kept, Retention


def _kept(*steps: int, **metrics: float) -> list[Kept]:
    return [Kept(f"step-{step}", step, metrics.get(f"m{step}")) for step in steps]


def _stay(retention: Retention, committed: list[Kept]) -> list[int]:
    gone = {kept.name for kept in retention.expendable(committed)}
    return [kept.step for kept in committed if kept.name not in gone]


def test_without_rules_everything_stays() -> None:
    assert _stay(Retention(), _kept(1, 2, 3)) == [1, 2, 3]


def test_the_last() -> None:
    assert _stay(Retention(last=2), _kept(1, 2, 3)) == [2, 3]


def test_last_goes_by_commits_and_not_by_steps() -> None:
    """A job that went back to an earlier step must not lose what it saves now."""
    assert _stay(Retention(last=2), _kept(900, 1000, 510)) == [1000, 510]


def test_every_so_many_steps() -> None:
    assert _stay(Retention(every=10), _kept(5, 10, 15, 20, 25)) == [10, 20, 25]


def test_the_best_and_the_last() -> None:
    committed = _kept(1, 2, 3, 4, m1=0.5, m2=0.1, m3=math.nan)
    assert _stay(Retention(last=1, best=1), committed) == [2, 4]
    assert _stay(Retention(best=1, lower_is_better=False), committed) == [1, 4]
    assert _stay(Retention(best=5), committed) == [1, 2, 4]


def test_of_equals_the_later_one_stays() -> None:
    assert _stay(Retention(best=1), _kept(1, 2, 3, 4, m1=0.5, m2=0.5)) == [2, 4]


@pytest.mark.parametrize("rule", ["last", "every", "best"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_rules_that_mean_nothing(rule: str, value: object) -> None:
    with pytest.raises(StateError, match=f"keep_{rule} is a whole number from 1 on"):
        Retention(**{rule: value})  # type: ignore[arg-type]


rules = st.builds(
    Retention,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 5),
    best=st.none() | st.integers(1, 3),
    lower_is_better=st.booleans(),
)
metrics = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(rules, st.lists(st.tuples(st.integers(0, 50), metrics), min_size=1, max_size=20, unique_by=lambda one: one[0]))
def test_what_stays(retention: Retention, saved: list[tuple[int, float | None]]) -> None:
    committed = [Kept(f"step-{step}", step, metric) for step, metric in saved]
    gone = retention.expendable(committed)
    stay = [kept for kept in committed if kept not in gone]
    assert stay[-1] == committed[-1], "what was committed last always stays"
    assert len(stay) >= min(len(committed), retention.last or 1)
    assert not any(retention.every and kept.step % retention.every == 0 for kept in gone)
    # What goes now would go later too: removing one at a time comes to the same.
    assert retention.expendable(stay) == []
