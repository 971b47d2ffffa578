"""Scale the time limits of tests for slow or busy machines.

The environment variable ``BCP_TEST_TIME_FACTOR`` is the factor. If it is not set, the pytest plugin
(``bytecheckpoint.testing.fixtures``) measures it at the start of a session and sets it, so that all processes of the
session use the same factor.
"""

from __future__ import annotations

import os
import time

TIME_FACTOR_VARIABLE = "BCP_TEST_TIME_FACTOR"

_LOOP_STEPS = 2_000_000
# CPython 3.10 needs about this long for the loop on a 2.5 GHz server core.
_LOOP_S = 0.12
# Beyond this, a test that hangs would block a session for most of an hour.
_MAX_MEASURED_FACTOR = 10.0


def time_limit(seconds: float) -> float:
    """Scale a time limit for this machine.

    Use it for every bound on how long something may take: timeouts of subprocesses, threads and futures, deadlines
    that a test does not expect to pass, and polling loops.

    Args:
        seconds: The limit on an idle machine.

    Returns:
        The limit on this machine, in seconds.

    Raises:
        ValueError: ``BCP_TEST_TIME_FACTOR`` is not a positive number.
    """
    return seconds * time_factor()


def time_factor() -> float:
    """Read the factor from the environment.

    Returns:
        The factor, 1 if the environment does not set it.

    Raises:
        ValueError: ``BCP_TEST_TIME_FACTOR`` is not a positive number.
    """
    text = os.environ.get(TIME_FACTOR_VARIABLE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"{TIME_FACTOR_VARIABLE} must be a positive number, not {text!r}")
    return factor


def measure_time_factor(workers: int = 1) -> float:
    """Estimate how much slower this machine will be than an idle reference machine.

    Args:
        workers: Number of processes that will run tests, in addition to the present load.

    Returns:
        The larger of two ratios, the load per core and the relative time of a short loop, between 1 and 10.
    """
    cores = len(os.sched_getaffinity(0))
    slowness = max((os.getloadavg()[0] + workers) / cores, _loop_s() / _LOOP_S)
    return round(min(max(slowness, 1.0), _MAX_MEASURED_FACTOR), 1)


def _loop_s() -> float:
    start = time.perf_counter()
    for _ in range(_LOOP_STEPS):
        pass
    return time.perf_counter() - start
