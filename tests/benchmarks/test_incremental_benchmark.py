"""Run the benchmark of incremental saves, and check what they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import incremental


@pytest.mark.full
def test_unchanged_states_write_less_than_one_percent(tmp_path: Path) -> None:
    found = {one["name"]: one for one in incremental.measure(64 << 20, 1, tmp_path)}
    shares = {name: one["written"] / one["bytes"] for name, one in found.items() if one["written"] is not None}
    assert shares["complete save"] > 1
    assert shares["unchanged"] < 0.01 > shares["unchanged, asynchronous"]
    assert shares["1 % of the chunks changed"] < 0.03
    assert shares["LoRA step"] < 0.06
    assert [row[0] for row in incremental.table([*found.values()]).rows] == list(found)
