"""Choose which cases of a large combinatorial test run: a sample that changes daily, or all of them.

``BCP_TEST_FULL=1`` runs every case, ``BCP_TEST_SEED=<number>`` repeats a sample.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def is_full() -> bool:
    return os.environ.get("BCP_TEST_FULL", "") not in ("", "0")


def seed() -> int:
    """All workers of a run must choose the same cases, so the default changes only once a day."""
    return int(os.environ.get("BCP_TEST_SEED") or time.time() // 86400)


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """Return ``count`` of the cases, in their order, or all of them in a full run."""
    if is_full() or len(cases) <= count:
        return list(cases)
    return [cases[number] for number in sorted(random.Random(seed()).sample(range(len(cases)), count))]
