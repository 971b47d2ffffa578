"""Run the DeepSpeed example as a user does: train, kill, and resume at another size and stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.deepspeed

_REPOSITORY = Path(__file__).parents[2]


def _train(folder: Path, processes: int, *options: str) -> tuple[int, dict[int, float]]:
    journal = folder / f"journal-{processes}"
    script = _REPOSITORY / "examples" / "train_deepspeed.py"
    launcher = _REPOSITORY / "tests" / "support" / "deepspeed_launcher.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    where = ["--root", str(folder / "root"), "--journal", str(journal), "--save-every", "2"]
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*torchrun, str(launcher), str(script), *where, *options],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=time_limit(140),
        check=False,
    )
    assert journal.exists(), done.stdout
    lines = map(json.loads, journal.read_text().splitlines())
    return done.returncode, {line["step"]: line["loss"] for line in lines}


@pytest.mark.full
def test_train_kill_resume(tmp_path: Path) -> None:
    code, first = _train(tmp_path, 2, "--stage", "2", "--stop-at", "9", "--kill-at-step", "5")
    assert (code != 0, sorted(first)) == (True, [1, 2, 3, 4, 5])
    code, second = _train(tmp_path, 3, "--stage", "3", "--offload", "--stop-at", "6")
    assert code == 0
    assert min(second) in (3, 5), "the save of step 4 may have been killed"
    assert max(second) == 6
    both = first.keys() & second.keys()
    assert max(abs(first[step] - second[step]) for step in both) < 2e-2
