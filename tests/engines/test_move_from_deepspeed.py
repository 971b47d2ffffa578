"""Run the script of ``docs/moving-from-deepspeed.md`` as a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.deepspeed

_REPOSITORY = Path(__file__).parents[2]


def _run(folder: Path, processes: int, *options: str) -> dict[int, float]:
    """The losses by step."""
    script = _REPOSITORY / "examples" / "move_from_deepspeed.py"
    launcher = _REPOSITORY / "tests" / "support" / "deepspeed_launcher.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*torchrun, str(launcher), str(script), *options, "--old", "old"],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=time_limit(140),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([0-9.]+)", done.stdout)}


def test_continue_at_another_stage_and_without_deepspeed(tmp_path: Path) -> None:
    assert sorted(_run(tmp_path, 2, "write", "--stage", "3")) == [1, 2, 3, 4]
    engine = _run(tmp_path, 3, "continue", "--stage", "1", "--new", "new")
    fsdp = _run(tmp_path, 2, "continue", "--fsdp", "--new", "fsdp")
    assert sorted(engine) == sorted(fsdp) == [5, 6, 7, 8]
    assert abs(engine[5] - fsdp[5]) < 2e-2, "the scheduler continues only in the engine"
    new, without = bcp.open(tmp_path / "new/step-8"), bcp.open(tmp_path / "fsdp/step-8")
    assert torch.equal(
        without["optimizer.state.head.weight.step"].load(), new["optimizer.state.head.weight.step"].load()
    )
    assert without.tree("extra_state") == {"global_steps": 8, "epoch": 1}
