"""Run the benchmark of many saves for a few seconds: every process must deliver samples, and no loads may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_run import measure, series, table


@pytest.mark.full
def test_every_process_is_measured(tmp_path: Path) -> None:
    result = measure(tmp_path, 0.2)
    assert {sample["rank"] for sample in result["samples"]} == {0, 1, 2}
    assert max(sample.get("step", 0) for sample in result["samples"]) > 0
    assert all(sample["descriptors"] > 0 for sample in result["samples"])
    assert len(table(result).rows) == 15
    assert all(lines for lines in series(result).values())
    assert not list(tmp_path.iterdir())
