"""Run every test of this directory that needs ranks twice: with a flat tree, and with groups of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bytecheckpoint.control.communicator import GROUP_VARIABLE
from bytecheckpoint.testing.ranks import RankPool


class GroupedRanks:
    """A pool whose ranks form groups of a given size."""

    def __init__(self, pool: RankPool, group_size: int) -> None:
        self._pool, self._group_size = pool, group_size

    def run(
        self, fn: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, **options: Any
    ) -> list[Any]:
        return self._pool.run(fn, *args, env={**(env or {}), GROUP_VARIABLE: str(self._group_size)}, **options)


@pytest.fixture(params=["flat", "grouped"])
def rank_pool(request: pytest.FixtureRequest, rank_pool: RankPool) -> RankPool | GroupedRanks:
    """The pool of the test kit, flat or with groups of two ranks."""
    return rank_pool if request.param == "flat" else GroupedRanks(rank_pool, 2)
