"""Which checkpoints the retention rules keep."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint import Retention
from bytecheckpoint.manager.housekeeping import Committed, expendable


def _committed(*steps: int, **metrics: float) -> list[Committed]:
    return [Committed(f"step-{step}", step, metrics.get(f"m{step}")) for step in steps]


def _kept(retention: Retention, committed: list[Committed]) -> list[int]:
    gone = {one.name for one in expendable(retention, committed)}
    return [one.step for one in committed if one.name not in gone]


def test_without_rules_all_are_kept() -> None:
    assert _kept(Retention(), _committed(1, 2, 3)) == [1, 2, 3]


def test_last() -> None:
    assert _kept(Retention(last=2), _committed(1, 2, 3)) == [2, 3]


def test_last_means_commits_and_not_steps() -> None:
    """A job that went back to an earlier step must not lose what it saves now."""
    assert _kept(Retention(last=2), _committed(900, 1000, 510)) == [1000, 510]


def test_last_hours() -> None:
    ages = {1: 49, 2: 47, 3: 48, 4: 1, 5: 0}
    committed = [Committed(f"step-{step}", step, created=1e9 - 3600 * age) for step, age in ages.items()]
    assert _kept(Retention(last_hours=48), committed) == [2, 3, 4, 5]
    assert _kept(Retention(last_hours=0.5), committed) == [5]
    assert _kept(Retention(last_hours=0.5, last=3), committed) == [3, 4, 5]


def test_last_hours_where_a_clock_was_wrong() -> None:
    """What seems to be saved later than the newest one stays, and so does everything if its own time is not known."""
    committed = [Committed(f"step-{step}", step, created=hour * 3600.0) for step, hour in ((1, 5), (2, 99), (3, 9))]
    assert _kept(Retention(last_hours=1), committed) == [2, 3]
    assert _kept(Retention(last_hours=1), [*committed, *_committed(4)]) == [1, 2, 3, 4]


def test_every_steps() -> None:
    assert _kept(Retention(every_steps=10), _committed(5, 10, 15, 20, 25)) == [10, 20, 25]


def test_every_steps_between_multiples() -> None:
    """The first of each ten steps is kept, also while later ones are not there yet."""
    steps = (0, 4, 12, 16, 19, 28, 30, 33, 51)
    assert _kept(Retention(every_steps=10), _committed(*steps)) == [0, 12, 28, 30, 51]
    for count in range(1, len(steps)):
        left = _kept(Retention(every_steps=10), _committed(*steps[:count]))
        assert set(left[:-1]) <= {0, 12, 28, 30}


def test_every_steps_after_a_rollback() -> None:
    """What was abandoned does not count."""
    committed = [Committed("step-12", 12, is_abandoned=True), *_committed(8, 14, 18, 21)]
    assert _kept(Retention(every_steps=10), committed) == [14, 21]


def test_best_and_last() -> None:
    committed = _committed(1, 2, 3, 4, m1=0.5, m2=0.1, m3=math.nan)
    assert _kept(Retention(last=1, best=1, metric="loss"), committed) == [2, 4]
    assert _kept(Retention(best=1, metric="loss", mode="max"), committed) == [1, 4]
    assert _kept(Retention(best=5, metric="loss"), committed) == [1, 2, 4]


def test_of_equal_metrics_the_later_step_is_kept() -> None:
    assert _kept(Retention(best=1, metric="loss"), _committed(1, 2, 3, 4, m1=0.5, m2=0.5)) == [2, 4]


rules = st.builds(
    lambda last, last_hours, every_steps, best, mode: Retention(
        last=last,
        last_hours=last_hours,
        every_steps=every_steps,
        best=best,
        metric=None if best is None else "loss",
        mode=mode,
    ),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 3),
    st.sampled_from(["min", "max"]),
)
metrics = st.none() | st.floats(allow_nan=True, allow_infinity=True)


saves = st.tuples(st.integers(0, 50), metrics, st.integers(0, 9))


@given(rules, st.lists(saves, min_size=1, max_size=20, unique_by=lambda one: one[0]))
def test_any_rules(retention: Retention, saved: list[tuple[int, float | None, int]]) -> None:
    committed = [Committed(f"step-{step}", step, metric, created=3600.0 * hour) for step, metric, hour in saved]
    gone = expendable(retention, committed)
    kept = [one for one in committed if one not in gone]
    assert kept[-1] == committed[-1], "the checkpoint that was committed last is always kept"
    assert len(kept) >= min(len(committed), retention.last or 1)
    assert not any(retention.every_steps and one.step % retention.every_steps == 0 for one in gone)
    reach = retention.last_hours
    assert not any(reach and one.created >= committed[-1].created - 3600 * reach for one in gone)
    # Nothing more goes later: removing one at a time has the same result.
    assert expendable(retention, kept) == []
