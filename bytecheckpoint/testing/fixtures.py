"""The pytest plugin of the test kit.

Enable it in the top ``conftest.py``: ``pytest_plugins = ["bytecheckpoint.testing.fixtures"]``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .rank_process import THIRD_PARTY_WARNINGS
from .ranks import RankPool
from .time_limits import TIME_FACTOR_VARIABLE, measure_time_factor, time_factor


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure the time factor, and ignore known warnings of third-party code."""
    if not os.environ.get(TIME_FACTOR_VARIABLE):
        # In the environment, so that xdist's workers, ranks and subprocesses use the factor of the session.
        os.environ[TIME_FACTOR_VARIABLE] = str(measure_time_factor(getattr(config.option, "numprocesses", None) or 1))
    for category, message in THIRD_PARTY_WARNINGS:
        # Colons separate the fields of a filter, so the expression must not contain one.
        config.addinivalue_line("filterwarnings", f"ignore:{message.replace(':', '.')}:{category.__name__}")


def pytest_report_header() -> str:
    """Show the time factor of the session."""
    return f"{TIME_FACTOR_VARIABLE}: {time_factor():g} (multiplies all time limits)"


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Provide up to 8 ranks that all tests of a session share.

    Yields:
        The pool; call ``rank_pool.run(fn, *args, world_size=4)``.
    """
    with RankPool(8) as pool:
        yield pool
