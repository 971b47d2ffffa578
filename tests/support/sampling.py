"""Choose which cases of a large combinatorial test run: a sample that depends on the commit, or all of them.

``BCP_TEST_FULL=1`` runs every case, ``BCP_TEST_SEED=<number>`` chooses another sample, ``BCP_TEST_EXAMPLES=<number>``
draws so many times as many examples of generative tests.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import defaultdict
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


def sample(cases: Sequence[Case], count: int, name: str = "") -> list[Case]:
    """Return ``count`` of the cases, in their order, or all of them in a full run. Another name chooses others."""
    if is_full() or len(cases) <= count:
        return list(cases)
    chosen = random.Random(f"{seed()} {name}").sample(range(len(cases)), count)
    return [cases[number] for number in sorted(chosen)]


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that only a full run runs, by their marks ``full`` and ``sampled``."""
    if is_full():
        return set()
    left = {item for item in items if item.get_closest_marker("full") is not None}
    groups: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    counts: dict[str, int] = {}
    for item in items:
        for mark in item.iter_markers("sampled"):
            name = mark.kwargs.get("of") or item.nodeid.partition("[")[0]
            groups[name].append(item)
            counts[name] = mark.args[0]
    # A group of a module contains those of its tests, so small groups come first.
    for name, cases in sorted(groups.items(), key=lambda group: len(group[1])):
        there = [case for case in cases if case not in left]
        left.update(set(there).difference(sample(there, counts[name], name)))
    return left


def examples(count: int, quick: int | None = None) -> int:
    """Return how many examples of a property a run draws: ``count`` in a full run, ``quick`` (a quarter) otherwise.

    ``BCP_TEST_EXAMPLES=20`` draws twenty times as many, for a long search.
    """
    drawn = count if is_full() else quick or max(10, count // 4)
    return drawn * int(os.environ.get("BCP_TEST_EXAMPLES") or 1)
