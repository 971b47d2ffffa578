"""The example of a reinforcement-learning loop, run as a user runs it. Needs vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"


def test_tokens_are_those_of_the_trainer_after_each_step() -> None:
    done = subprocess.run(
        [sys.executable, str(_EXAMPLE), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=time_limit(280),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 2
    assert all("50% of what a broadcast sends, tokens equal" in line for line in steps)
