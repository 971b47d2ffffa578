"""Run the benchmark of the first save of a process, on a state so small that the figures mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_save import KINDS, measure, table


@pytest.mark.full
def test_every_kind_of_process_is_measured(tmp_path: Path) -> None:
    messages: list[str] = []
    result = measure(0.001, 1, tmp_path, workload="tiny-tensors", pause_s=0.0, say=messages.append)
    assert tuple(result["kinds"]) == KINDS
    assert len(messages) == len(KINDS)
    for kind, (sample,) in result["kinds"].items():
        assert ("warmup_s" in sample) == kind.endswith("warmup")
        assert all(sample[save]["stall_s"] > 0 for save in ("first", "second"))
    assert [row[0] for row in table(result).rows] == list(KINDS)
    assert table(result).rows[0][3] == "1.00"
    assert not list(tmp_path.iterdir())
