"""Pushes when torch's allocator uses ``expandable_segments``, whose memory has no CUDA IPC handles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

_PUSHES = """
import sys
import torch
from streams import RING
from toy_engine import ToyTrainee, expected_digests, toy_engine
from bytecheckpoint.inference.push import HttpEngine, Pusher

device = torch.device(sys.argv[1])
devices = [str(device)] if device.type == "cuda" else []
with toy_engine(1, devices=devices) as engine:
    for version, options in enumerate(({}, RING, {**RING, "cuda_ipc": True})):
        if device.type == "cuda" or not options.get("cuda_ipc"):
            with Pusher(HttpEngine(engine.url), **options) as pusher:
                pusher.push(ToyTrainee(version).to(device), version=version)
            assert engine.look()["digests"] == expected_digests(version, 1), options
if device.type == "cuda":
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
"""


def test_pushes(device: object) -> None:
    """This library shares memory that it has allocated itself, so all transports work."""
    support = str(Path(__file__).parents[1] / "support")
    paths = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", _PUSHES, str(device)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=time_limit(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
