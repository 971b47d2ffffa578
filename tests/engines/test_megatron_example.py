"""Run the Megatron example kill it, and resume it with other parallel sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_scripts import run_script

pytestmark = pytest.mark.megatron


def _train(folder: Path, processes: int, *arguments: str, dies: bool = False) -> dict[int, float]:
    """Run the script, and return its losses by step."""
    options = ["--root", "run", "--save-every", "2", *arguments]
    events = map(json.loads, run_script(folder, "train_megatron.py", processes, *options, dies=dies).splitlines())
    return {event["step"]: event["loss"] for event in events}


@pytest.mark.full
def test_a_killed_run_resumes_at_another_size(tmp_path: Path) -> None:
    killed = _train(tmp_path, 4, "--tp", "2", "--pp", "2", "--steps", "9", "--die-at", "5", dies=True)
    assert list(killed) == [1, 2, 3, 4, 5]
    resumed = _train(tmp_path, 2, "--tp", "1", "--pp", "1", "--steps", "7")
    assert list(resumed) == [5, 6, 7]
    assert resumed[5] == pytest.approx(killed[5], abs=1e-3)
    assert resumed[7] < killed[1]
