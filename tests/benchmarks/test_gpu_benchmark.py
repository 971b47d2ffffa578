"""A dry run of ``make gpu`` without a GPU: the same code, on a state so small that the figures mean nothing."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_faults
import pytest

from benchmarks.gpu import Part, PartFailed, Settings, run_tests
from bytecheckpoint.testing import time_limit

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings("cpu", 1 << 20, 1, "")


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--json", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md"), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu", *places, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "--device", "cpu", "--mebibytes", "6", "--rounds", "1", "--tests", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["is_complete"]
    assert document["failures"] == {}
    counts = document["tests"]["tests/gpu"]["counts"]
    assert counts["passed"] > 15
    assert set(counts) <= {"passed", "skipped"}
    measured = set(document["seconds"])
    for name in ("stall, asynchronous", "stall, gated", "save, durable", "load, cold"):
        assert f"bytecheckpoint: {name}" in measured
    assert {"device to device", "torch DCP: load, cold", "safetensors: save, durable"} <= measured
    assert any(name.startswith("bytecheckpoint: push, shared memory") for name in measured)
    assert {name for name in measured if "checkpoint-engine" in name} <= {
        "a loop like checkpoint-engine's, in one process: push",
        "checkpoint-engine's function for workers, with a sender written here: push",
    }
    text = (tmp_path / "gpu.md").read_text()
    assert "CPU only (a dry run)" in text
    assert "| bytecheckpoint: load, cold |" in text
    assert "| floor: one copy of the weights (" in text
    assert "bytecheckpoint: push, floor" not in text
    assert "has not ended" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


@pytest.mark.skipif("os.path.exists('/dev/nvidia0')", reason="has a GPU")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, "--tests")
    assert done.returncode == 2
    assert "cuda:0 cannot be used here; --device cpu makes a dry run" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("served", "message"),
    [(gpu_faults.crash, "its process ended with code -11"), (gpu_faults.hang, "(?s)in hang.*no end after 1 s")],
)
def test_a_part_that_fails(tmp_path: Path, served: Callable[..., None], message: str) -> None:
    part = Part("a part", SETTINGS, tmp_path / "log", served)
    with pytest.raises(PartFailed, match=message):
        part.run(1 if served is gpu_faults.hang else time_limit(60))


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    part = Part("a part", SETTINGS, tmp_path / "log", gpu_faults.leave_processes)
    started = os.pidfd_open(part.run(time_limit(60)))
    part.kill()
    try:
        assert select.select([started], [], [], time_limit(60))[0]
    finally:
        os.close(started)


@pytest.mark.slow
def test_tests_that_hang(tmp_path: Path) -> None:
    """They have started a process that keeps their output open."""
    (tmp_path / "test_hang.py").write_text(
        "import subprocess, sys\n\n"
        "def test_first():\n    pass\n\n"
        "def test_hangs():\n    subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    )
    limit_s = time_limit(5)
    found = run_tests(str(tmp_path / "test_hang.py"), limit_s, tmp_path / "log", "cpu")
    assert found["failure"] == f"no end after {limit_s:.0f} s"
    assert found["counts"] == {"passed": 1}
    assert "in test_hangs" in found["output"]
