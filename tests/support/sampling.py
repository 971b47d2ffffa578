"""Choose which cases of a large combinatorial test run: a sample that depends on the commit, or all of them.

``BCP_TEST_FULL=1`` runs every case, ``BCP_TEST_SEED=<number>`` chooses another sample.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def is_full() -> bool:
    return os.environ.get("BCP_TEST_FULL", "") not in ("", "0")


def seed() -> int:
    return int(os.environ.get("BCP_TEST_SEED") or _commit_number())


@cache
def _commit_number() -> int:
    """A number of the commit that is checked out, so that every run of it has the same cases; 0 without git."""
    try:
        git = ["git", "rev-parse", "--short=7", "HEAD"]
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout.strip(), 16)


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """Return ``count`` of the cases, in their order, or all of them in a full run."""
    if is_full() or len(cases) <= count:
        return list(cases)
    return [cases[number] for number in sorted(random.Random(seed()).sample(range(len(cases)), count))]


_LONG_VLLM = ("async", "parallel", "replicas", "restart")


def long_vllm(name: str) -> pytest.MarkDecorator:
    """Skip a long module of tests with vLLM unless it is the one that this run has drawn."""
    return pytest.mark.skipif(
        name not in sample(_LONG_VLLM, 1), reason="other runs test this module; BCP_TEST_FULL=1 tests all"
    )
