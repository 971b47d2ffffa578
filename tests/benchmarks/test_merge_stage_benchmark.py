"""Run the benchmark of the merge stage, and check its counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.merge_stage import measure, table


@pytest.mark.full
def test_every_contestant_is_measured(tmp_path: Path) -> None:
    result = measure(2, 0.005, 1, tmp_path)
    assert list(result["contestants"]) == ["shards", "merged", "whole", "DCP sharded", "DCP full"]
    samples = {name: of_name[0] for name, of_name in result["contestants"].items()}
    for name, sample in samples.items():
        assert sample["stall_s"] >= sample["return_s"] > 0
        assert sample["durable_s"] > 0
        assert sample["reads"] > 0
        assert sample["file_bytes"] >= result["bytes"], name
        # The counter covers the machine, so it includes the traffic of other processes.
        assert sample["wire_bytes"] > 0
    assert "merge" in samples["whole"]["stages"]
    assert [row[0] for row in table(result).rows] == list(samples)
