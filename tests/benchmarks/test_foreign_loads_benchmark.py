"""Run the benchmark of in-place loads, and check its counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import foreign_loads


@pytest.mark.full
def test_bytes_and_seconds_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_loads, "CASES", foreign_loads.CASES[1:2])
    result = foreign_loads.measure(0.01, 1, tmp_path, say=lambda text: None)
    ((title, samples),) = result["cases"].items()
    (ours,), (theirs,) = samples["bytecheckpoint"], samples["DCP"]
    # The shards of all ranks: weights and two moments in float32, and counters.
    assert 12 * result["parameters"] <= ours["requested"] <= 12.1 * result["parameters"]
    assert ours["requested"] < ours["read"] < theirs["read"], "DCP reads each chunk as a whole on every rank"
    assert ours["seconds"] > 0
    assert [row[0] for row in foreign_loads.table(result).rows] == [title]
