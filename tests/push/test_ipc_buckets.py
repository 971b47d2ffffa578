"""Buckets when memory is short."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import checkpoint_engine
from bytecheckpoint.inference.push.checkpoint_engine import make_buckets
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena


def test_memory_that_does_not_suffice_for_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def arena(nbytes: int) -> SharedArena:
        if nbytes > 10_000:
            raise EngineError("no memory")
        return SharedArena(nbytes)

    monkeypatch.setattr(checkpoint_engine, "SharedArena", arena)
    buckets = make_buckets(["one", "two"], 5_000)
    assert buckets.nbytes == 5_000
    assert len(buckets.handles) == 2
    buckets.close()
    with pytest.raises(
        EngineError, match=r"no memory for two buckets of 6,000 bytes on one(.|\n)*smaller bucket_bytes"
    ):
        make_buckets(["one"], 6_000)
