"""Pushes into an ``AsyncLLM`` of the sender's process, of two data-parallel replicas. Needs vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import vllm_pushes
from vllm_pushes import ENVIRONMENT, made, reference_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]


def _serves(seed: int) -> list[Any]:
    return [[reference_tokens(made("llama", seed))] * 2, str(seed), False]


def test_it_generates_meanwhile(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path)
    script = Path(vllm_pushes.__file__).with_name("vllm_async.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=time_limit(200), check=False, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    waited, kept, failed, native, blocked = json.loads(lines[0].removeprefix("RESULTS "))
    assert waited == ["", 50, *_serves(1)]
    assert kept == ["", *_serves(2)]
    assert "the layer does not fit" in failed[0]
    assert failed[1:] == _serves(2)
    assert native == ["", *_serves(4)]
    assert blocked.startswith("UsageError: a push blocks the event loop")
