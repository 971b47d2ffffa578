"""What all tests of a session share: the factor of their time limits, known warnings, and a pool of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from bytecheckpoint.testing import RankPool
from bytecheckpoint.testing.rank_process import THIRD_PARTY_WARNINGS
from bytecheckpoint.testing.time_limits import TIME_FACTOR_VARIABLE, time_factor

_LOOP_STEPS = 2_000_000
# CPython 3.10 needs about this long for the loop on a 2.5 GHz server core.
_LOOP_S = 0.12
# Beyond this, a test that hangs would block a session for most of an hour.
_MAX_MEASURED_FACTOR = 10.0


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
    """Up to 8 ranks that all tests of a session share: ``rank_pool.run(fn, *args, world_size=4)``."""
    with RankPool(8) as pool:
        yield pool


def measure_time_factor(workers: int = 1) -> float:
    """Estimate how much slower this machine will be than an idle reference machine, between 1 and 10.

    It is the larger of two ratios: the load per core, with ``workers`` processes more than now, and the relative time
    of a short loop.
    """
    cores = len(os.sched_getaffinity(0))
    slowness = max((os.getloadavg()[0] + workers) / cores, _loop_s() / _LOOP_S)
    return round(min(max(slowness, 1.0), _MAX_MEASURED_FACTOR), 1)


def _loop_s() -> float:
    start = time.perf_counter()
    for _ in range(_LOOP_STEPS):
        pass
    return time.perf_counter() - start
