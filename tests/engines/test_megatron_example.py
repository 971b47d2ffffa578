"""Run the Megatron example as a user does, kill it, and resume it with other parallel sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

pytestmark = pytest.mark.megatron
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_megatron.py"


def _train(root: Path, processes: int, *arguments: str) -> tuple[int, dict[int, float]]:
    """Run the script, and return its exit status and its losses by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(SCRIPT), "--root", str(root), "--save-every", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(120), env=environment)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert events, done.stdout + done.stderr
    return done.returncode, {event["step"]: event["loss"] for event in events}


def test_a_killed_run_resumes_at_another_size(tmp_path: Path) -> None:
    status, killed = _train(tmp_path / "run", 4, "--tp", "2", "--pp", "2", "--steps", "9", "--die-at", "5")
    assert status != 0
    assert list(killed) == [1, 2, 3, 4, 5]
    status, resumed = _train(tmp_path / "run", 2, "--tp", "1", "--pp", "1", "--steps", "7")
    assert status == 0
    assert list(resumed) == [5, 6, 7]
    assert resumed[5] == pytest.approx(killed[5], abs=1e-3)
    assert resumed[7] < killed[1]
