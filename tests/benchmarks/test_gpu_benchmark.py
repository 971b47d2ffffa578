"""A dry run of ``make gpu`` without a GPU: the same code, on a state so small that the figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--json", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md"), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu", *places, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "--device", "cpu", "--mebibytes", "6", "--rounds", "1", "--tests", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["failures"] == {}
    assert document["tests"].get("skipped", 0) > 0 or "passed" in document["tests"]
    assert "failed" not in document["tests"]
    measured = set(document["seconds"])
    for name in ("stall, asynchronous", "stall, gated", "save, durable", "load, cold"):
        assert f"bytecheckpoint: {name}" in measured
    assert {"device to device", "torch DCP: load, cold", "safetensors: save, durable"} <= measured
    assert any(name.startswith("bytecheckpoint: push") for name in measured)
    assert "checkpoint-engine's method: push" in measured
    text = (tmp_path / "gpu.md").read_text()
    assert "CPU only (a dry run)" in text
    assert "| bytecheckpoint: load, cold |" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


@pytest.mark.skipif("os.path.exists('/dev/nvidia0')", reason="has a GPU")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, "--tests")
    assert done.returncode == 2
    assert "there is no CUDA device here" in done.stdout
    assert os.listdir(tmp_path) == []
