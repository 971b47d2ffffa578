"""pytest plugin of the kit: ``pytest_plugins = ["bytecheckpoint.testing.fixtures"]`` in the top ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rank_process import THIRD_PARTY_WARNINGS
from .ranks import RankPool

__all__ = ["pytest_configure", "rank_pool"]


def pytest_configure(config: pytest.Config) -> None:
    for category, message in THIRD_PARTY_WARNINGS:
        # A colon separates the fields of a filter, so none may stand in the expression.
        config.addinivalue_line("filterwarnings", f"ignore:{message.replace(':', '.')}:{category.__name__}")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to 8 ranks, shared by all tests of a run: ``rank_pool.run(fn, *args, world_size=4)``."""
    with RankPool(8) as pool:
        yield pool
