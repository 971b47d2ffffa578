from __future__ import annotations

import pytest
import sampling
from session_plugin import measure_time_factor

from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.time_limits import TIME_FACTOR_VARIABLE, time_factor


def test_limits_are_scaled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIME_FACTOR_VARIABLE, "2.5")
    assert time_limit(4) == 10.0
    monkeypatch.delenv(TIME_FACTOR_VARIABLE)
    assert time_limit(4) == 4.0


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan"])
def test_a_factor_that_is_no_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIME_FACTOR_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{TIME_FACTOR_VARIABLE} must be a positive number, not '{text}'"):
        time_factor()


def test_the_measured_factor_is_bounded() -> None:
    assert 1.0 <= measure_time_factor() <= 10.0


def test_the_session_has_one_factor(request: pytest.FixtureRequest) -> None:
    seconds = 1200 if sampling.is_full() else 300
    assert request.config.getoption("timeout") == pytest.approx(time_limit(seconds))
