"""The benchmark of the control plane runs and shows the purpose of the tree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scale_control
from benchmarks.scale_control import SAVES, measure_processes, simulate


def test_a_tree_reduces_the_load_of_the_busiest_rank() -> None:
    flat, grouped = simulate(1024, 1024), simulate(1024, None)
    for one, other in zip(flat, grouped):
        assert one["save"] == other["save"]
        assert one["inner_ranks"] == 1
        assert one["connections"] == 1023
        assert other["inner_ranks"] == 32
        assert other["connections"] <= 3 * 32
        assert other["messages"] < one["messages"] / 10


def test_a_flat_exchange_costs_one_message_per_rank() -> None:
    small, large = simulate(16, 16), simulate(32, 32)
    for one, other, exchanges in zip(small, large, SAVES.values()):
        per_rank = (other["messages"] - one["messages"]) / 16
        assert per_rank == len(exchanges) + 1, "one more message when a rank leaves"


@pytest.mark.full
def test_round_trips_of_processes_are_measured() -> None:
    rows = measure_processes([2, 4], round_trips=20)
    assert [(row["processes"], row["group_size"]) for row in rows] == [(2, 2), (4, 4), (4, 2)]
    assert all(0 < row["median_ms"] <= row["p90_ms"] for row in rows)


def test_figures_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "scale_control.json"
    command = ["scale_control", "--ranks", "100", "--processes", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    scale_control.main()
    found = json.loads(file.read_text())
    assert len(found["simulated"]) == 2 * len(SAVES)
    assert "groups of 16" in capsys.readouterr().out
