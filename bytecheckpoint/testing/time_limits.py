"""Scale the time limits of tests for slow or busy machines.

The environment variable ``BCP_TEST_TIME_FACTOR`` is the factor, so that all processes of a session use the same one.
"""

from __future__ import annotations

import os

TIME_FACTOR_VARIABLE = "BCP_TEST_TIME_FACTOR"


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
