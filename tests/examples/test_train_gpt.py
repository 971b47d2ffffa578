"""Run the training script as a user does, kill or preempt it, and resume it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
STEPS, SAVED_AT = 8, 4

pytestmark = pytest.mark.full


def train(folder: Path, *arguments: str, processes: int = 1, exit_code: int = 0) -> dict[int, float]:
    """Run the script, check its exit code, and return its losses by step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    journal = folder / f"journal-{len(list(folder.iterdir()))}.jsonl"
    command = [sys.executable, *(launcher if processes > 1 else []), str(TRAIN), "--steps", str(STEPS)]
    command += ["--batch", "4", "--save-every", str(SAVED_AT), "--journal", str(journal)]
    command += ["--root", str(folder / "checkpoints"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit(200), env=environment)
    assert done.returncode == exit_code, done.stdout + done.stderr
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    losses = train(tmp_path_factory.mktemp("reference"), "--no-save")
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The folder and the losses of a run that was killed during its second save."""
    folder = tmp_path_factory.mktemp("killed")
    kill = ["--kill-rank", "0", "--kill-at-step", str(STEPS), "--kill-phase", "confirm"]
    return folder, train(folder, *kill, exit_code=-signal.SIGKILL)


def copy_of(folder: Path, copy: Path) -> Path:
    """Copy the checkpoints: a run that resumes adds new ones."""
    shutil.copytree(folder / "checkpoints", copy / "checkpoints")
    return copy


def test_a_run_killed_during_a_save_resumes_bit_equal(
    reference: dict[int, float], killed: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    folder, first = killed
    newest = bcp.latest(folder / "checkpoints")
    assert newest is not None
    assert newest.step == SAVED_AT
    assert newest.verify().ok
    second = train(copy_of(folder, tmp_path))
    assert sorted(second) == list(range(SAVED_AT + 1, STEPS + 1))
    assert {**first, **second} == reference


def test_a_preempted_run_saves_its_current_step(tmp_path: Path) -> None:
    """The launcher gets SIGTERM, as from a scheduler."""
    journal = tmp_path / "journal.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAIN)]
    command += ["--parallel", "ddp", "--steps", "100000", "--batch", "4", "--save-every", "100000"]
    command += ["--journal", str(journal), "--root", str(tmp_path / "checkpoints")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in iter(process.stdout.readline, ""):
        if "] step " in line:
            process.terminate()
            break
    output, _ = process.communicate(timeout=time_limit(200))
    assert process.returncode != 0, output
    steps = [json.loads(line)["step"] for line in journal.read_text().splitlines() if '"event": "step"' in line]
    newest = bcp.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.step == steps[-1] < 100_000
    assert newest.verify().ok


def test_a_run_resumed_with_tensor_parallelism_is_equal_within_rounding(
    reference: dict[int, float], killed: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    losses = train(copy_of(killed[0], tmp_path), "--parallel", "tp", processes=2)
    assert sorted(losses) == list(range(SAVED_AT + 1, STEPS + 1))
    assert losses == pytest.approx({step: reference[step] for step in losses}, abs=1e-5)
