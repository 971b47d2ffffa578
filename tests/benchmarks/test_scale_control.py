"""The control plane's benchmark runs, and shows what the tree is for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scale_control
from benchmarks.scale_control import SAVES, CountingStore, measure_processes, simulate


def test_a_tree_takes_the_load_off_the_busiest_store() -> None:
    flat, grouped = simulate(1024, 1024), simulate(1024, None)
    for one, other in zip(flat, grouped):
        assert one["save"] == other["save"]
        assert one["stores"] == 1
        assert one["connections"] == 1023
        assert other["stores"] == 32
        assert other["connections"] <= 3 * 32
        assert other["messages"] < one["messages"] / 10
        assert other["bytes"] < one["bytes"]


def test_a_flat_exchange_costs_some_messages_for_each_rank() -> None:
    small, large = simulate(16, 16), simulate(32, 32)
    for one, other, exchanges in zip(small, large, SAVES.values()):
        per_rank = (other["messages"] - one["messages"]) / 16
        assert len(exchanges) < per_rank < 8 * len(exchanges)


def test_requests_and_bytes_are_counted() -> None:
    store = CountingStore()
    store.set("key", b"value")
    assert store.get("key") == b"value"
    assert store.check(["key"])
    assert not store.check(["other"])
    assert store.add("count", 1) == 1
    assert store.compare_set("key", "", b"second") == b"value"
    assert store.delete_key("key")
    assert (store.messages, store.nbytes) == (7, 8 + 8 + 3 + 5 + 6 + 9 + 3)
    assert store.num_keys() == 1


def test_processes_meet() -> None:
    rows = measure_processes([2, 4], meetings=20)
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
