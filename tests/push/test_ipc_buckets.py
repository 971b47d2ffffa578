"""Buckets when memory is short."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import IpcEngine, checkpoint_engine

pytest.importorskip("zmq")

pytestmark = pytest.mark.vllm  # pyzmq is there


def test_memory_that_does_not_suffice_for_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def buckets(*arguments: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(checkpoint_engine, "gpus_of", lambda devices: [0])
    monkeypatch.setattr(checkpoint_engine, "Buckets", buckets)
    engine = IpcEngine("http://127.0.0.1:9", devices=["GPU-1"])
    with pytest.raises(EngineError, match=r"two buckets of 12,032 bytes on GPU-1 .*smaller bucket_bytes"):
        engine._model.load(iter([("weight", torch.ones(3000))]))
    engine.close()
