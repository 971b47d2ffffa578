"""Run the benchmark of trainers with one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trainers

pytestmark = [pytest.mark.huggingface, pytest.mark.full]


def test_stalls_and_totals_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two new interpreters import transformers."""
    monkeypatch.setattr(trainers, "CASES", {"transformers": ("Trainer", "bytecheckpoint")})
    result = trainers.measure(1, tmp_path, 0.01, say=lambda text: None)
    for (sample,) in result["transformers"].values():
        assert sample["bytes"] > 0
        assert len(sample["stalls"]) == trainers.STEPS // trainers.EVERY - 1, "nothing follows the last save"
    assert [row[1] for row in trainers.table(result).rows] == ["Trainer", "bytecheckpoint"]
