"""Run the benchmark of object stores against a real server, without the client that only the benchmark installs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.object_store import CONTESTANTS, Store, measure, table

pytestmark = [pytest.mark.s3, pytest.mark.slow]


@pytest.mark.full
def test_every_contestant_saves_and_loads(bucket: str, s3: dict[str, Any]) -> None:
    store = Store(s3["endpoint_url"], s3["key"], s3["secret"], bucket)
    names = [name for name in CONTESTANTS if not name.startswith("obstore")]
    messages: list[str] = []
    result = measure(store, 0.001, 1, names=names, say=messages.append)
    assert len(messages) == 2 * len(names)
    for samples in result["contestants"].values():
        (sample,) = samples
        assert sample["save"]["durable_s"] > 0
        assert sample["load"]["seconds"] > 0
    rows = table(result).rows
    assert [row[0] for row in rows] == names
    assert rows[0][2] == rows[0][7] == "1.00"
