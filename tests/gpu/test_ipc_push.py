"""Pushes into the memory of GPUs by checkpoint-engine's protocol, to its own function for workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("checkpoint_engine")

from toy_engine import ToyTrainee, expected_digests
from toy_ipc_engine import toy_ipc_engine

from bytecheckpoint.errors import EngineError, StateError
from bytecheckpoint.inference.push import IpcEngine, Pusher
from bytecheckpoint.inference.push.transports.cuda_ipc import visible_gpus
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

# In a dry run, workers are on CPUs.
GPUS = list(visible_gpus())[:2]
NAMES = GPUS or ["cpu-0", "cpu-1"]


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 20_000, "chunk_bytes": 4096}], ids=["double", "streamed"])
def test_ten_updates_in_a_row(device: torch.device, options: dict[str, Any]) -> None:
    with toy_ipc_engine(len(NAMES), cuda=bool(GPUS)) as engine:
        ipc_engine = IpcEngine(engine.url, devices=NAMES, bucket_bytes=20_000)
        with Pusher(ipc_engine, deadline_s=time_limit(60), **options) as pusher:
            for version in range(1, 11):
                pusher.push(ToyTrainee(version).to(device), version=version)
                assert engine.look()["digests"] == expected_digests(version, len(NAMES))


def test_a_worker_that_raises(device: torch.device) -> None:
    with toy_ipc_engine(len(NAMES), cuda=bool(GPUS)) as engine:
        with Pusher(IpcEngine(engine.url, devices=NAMES, bucket_bytes=20_000)) as pusher:
            pusher.push(ToyTrainee(1).to(device), version=1)
            engine.fault(0, "raise", 1)
            with pytest.raises(EngineError, match="the layer does not fit"):
                pusher.push(ToyTrainee(2).to(device), version=2)
            assert engine.look()["digests"] == expected_digests(1, len(NAMES))


def test_a_gpu_that_is_not_here(device: torch.device) -> None:
    with pytest.raises(StateError, match="does not see GPU-other"):
        IpcEngine("http://127.0.0.1:9", devices=["GPU-other"])
