"""Buckets when memory is short."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import checkpoint_engine
from bytecheckpoint.inference.push.checkpoint_engine import make_buckets
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all requested arenas; 10,000 bytes are available."""
    found: list[int] = []

    def arena(nbytes: int) -> SharedArena:
        found.append(nbytes)
        if nbytes > 10_000:
            raise EngineError("no memory")
        return SharedArena(nbytes)

    monkeypatch.setattr(checkpoint_engine, "SharedArena", arena)
    return found


def test_buckets_shrink_to_the_available_memory(tried: list[int]) -> None:
    buckets = make_buckets(["one", "two"], 20_000, 300)
    assert tried == [40_000, 20_480, 10_240, 5_120]
    assert buckets.nbytes == 2_560
    assert len(buckets.handles) == 2
    buckets.close()


def test_buckets_must_hold_the_largest_tensor(tried: list[int]) -> None:
    make_buckets(["one"], 20_000, 4_992).close()
    assert tried[-1] == 2 * 4_992
    with pytest.raises(EngineError, match=r"two buckets of 6,000 bytes, the size of the largest tensor, on one"):
        make_buckets(["one"], 20_000, 6_000)
