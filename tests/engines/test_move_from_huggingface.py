"""Run the script of ``docs/moving-from-huggingface.md`` as a user does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_REPOSITORY = Path(__file__).parents[2]
_SCRIPT = str(_REPOSITORY / "examples" / "move_from_huggingface.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=time_limit(140),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_continue_with_fsdp_and_export(tmp_path: Path) -> None:
    _run(tmp_path, _SCRIPT, "write", "--old", "all", "--stop-at", "8")
    log = json.loads((tmp_path / "all/checkpoint-8/trainer_state.json").read_text())["log_history"]
    expected = {entry["step"]: entry["loss"] for entry in log if entry["step"] > 4 and "loss" in entry}
    # The same run, of which only the first four steps are there.
    (tmp_path / "old").mkdir()
    (tmp_path / "all/checkpoint-4").rename(tmp_path / "old/checkpoint-4")
    printed = _run(tmp_path, *_TORCHRUN, _SCRIPT, "continue", "--old", "old", "--new", "new")
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([0-9.]+)", printed)}
    assert losses == pytest.approx(expected, abs=2e-4)
    assert bcp.open(tmp_path / "new/step-8").verify().ok
    folders = [str(tmp_path / name) for name in ("new/step-8", "exported", "old/checkpoint-4")]
    export = ["export", *folders[:2], "--config-from", folders[2]]
    ran = CliRunner().invoke(cli, export)
    assert "complete according to config.json" in ran.output, ran.output
    used = [_run(tmp_path, _SCRIPT, "use", "--model", folder) for folder in ("exported", "all/checkpoint-8")]
    found, theirs = (float(re.findall(r"loaded  loss ([0-9.]+)", text)[0]) for text in used)
    assert found == pytest.approx(theirs, abs=2e-3)
