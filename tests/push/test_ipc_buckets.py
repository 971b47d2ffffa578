"""Buckets of less memory than was asked for."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import ipc_buckets
from bytecheckpoint.inference.push.arena import Arena
from bytecheckpoint.inference.push.ipc_buckets import make_buckets


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of memory that was asked for; there are 10,000."""
    found: list[int] = []

    def arena(nbytes: int) -> Arena:
        found.append(nbytes)
        if nbytes > 10_000:
            raise EngineError("no memory")
        return Arena(nbytes)

    monkeypatch.setattr(ipc_buckets, "Arena", arena)
    return found


def test_they_are_as_long_as_memory_allows(tried: list[int]) -> None:
    buckets = make_buckets(["one", "two"], 20_000, 300)
    assert tried == [40_000, 20_480, 10_240, 5_120]
    assert buckets.nbytes == 2_560
    assert len(buckets.handles) == 2
    buckets.close()


def test_they_hold_the_longest_tensor(tried: list[int]) -> None:
    make_buckets(["one"], 20_000, 4_992).close()
    assert tried[-1] == 2 * 4_992
    with pytest.raises(EngineError, match=r"two buckets of 6,000 bytes, which the longest tensor takes, on one"):
        make_buckets(["one"], 20_000, 6_000)
