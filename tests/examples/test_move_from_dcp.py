"""The script of docs/dcp.md runs as the page shows it, and its losses are those of an uninterrupted run."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "move_from_dcp.py"

pytestmark = pytest.mark.full


def run(root: Path, processes: int, *stages: str) -> dict[int, float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, str(SCRIPT), "--root", str(root), "--stage", *stages]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(120), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    return {int(step): float(loss) for _, step, _, loss in lines}


def _uninterrupted(rank: int, world_size: int) -> dict[int, float]:
    script = runpy.run_path(str(SCRIPT))
    model, optimizer = script["build"]()
    return {step: script["train_step"](model, optimizer, step) for step in range(1, 13)}


def test_each_stage_continues_the_one_before(tmp_path: Path, rank_pool: RankPool) -> None:
    losses = {**run(tmp_path, 2, "torch", "switch"), **run(tmp_path, 1, "library")}
    expected = rank_pool.run(_uninterrupted, world_size=2)[0]
    assert losses == pytest.approx(expected, abs=1e-4)
    for step in (8, 12):
        checkpoint = bcp.open(tmp_path / f"step-{step}")
        assert checkpoint.verify().ok
        assert checkpoint.step == step
