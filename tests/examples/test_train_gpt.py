"""The training script, run as a user runs it: what it resumes is what it saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint as bcp

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
STEPS, SAVED_AT = 8, 4

pytestmark = pytest.mark.slow


def train(folder: Path, *arguments: str, processes: int = 1, ends: int = 0) -> dict[int, float]:
    """Run the script, which must end with the exit code ``ends``; returns its losses by step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    journal = folder / f"journal-{len(list(folder.iterdir()))}.jsonl"
    command = [sys.executable, *(launcher if processes > 1 else []), str(TRAIN), "--steps", str(STEPS)]
    command += ["--batch", "4", "--save-every", str(SAVED_AT), "--journal", str(journal)]
    command += ["--root", str(folder / "checkpoints"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == ends, done.stdout + done.stderr
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    losses = train(tmp_path_factory.mktemp("reference"), "--no-save")
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def test_killed_in_a_save_then_resumed_is_bit_equal(reference: dict[int, float], tmp_path: Path) -> None:
    kill = ["--kill-rank", "0", "--kill-at-step", str(STEPS), "--kill-phase", "confirm"]
    first = train(tmp_path, *kill, ends=-signal.SIGKILL)
    newest = bcp.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.step == SAVED_AT
    assert newest.verify().ok
    second = train(tmp_path)
    assert sorted(second) == list(range(SAVED_AT + 1, STEPS + 1))
    assert {**first, **second} == reference


def test_told_to_leave_it_saves_the_step_it_is_at(reference: dict[int, float], tmp_path: Path) -> None:
    """SIGTERM to the launcher, as a scheduler sends it."""
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
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0, output
    steps = [json.loads(line)["step"] for line in journal.read_text().splitlines() if '"event": "step"' in line]
    newest = bcp.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.step == steps[-1] < 100_000
    assert newest.verify().ok


def test_resumed_with_tensor_parallelism_is_equal_within_rounding(reference: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path, "--stop-at", str(SAVED_AT))
    losses = train(tmp_path, "--parallel", "tp", processes=2)
    assert sorted(losses) == list(range(SAVED_AT + 1, STEPS + 1))
    assert losses == pytest.approx({step: reference[step] for step in losses}, abs=1e-5)
