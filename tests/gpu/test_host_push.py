"""Weights into the memory of devices by the transports that need no device: through host memory, which is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from streams import RING
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(device: torch.device) -> Iterator[ToyEngine]:
    count = max(torch.cuda.device_count(), 1)
    devices = [f"cuda:{rank % count}" for rank in range(2)] if device.type == "cuda" else []
    with toy_engine(2, devices=devices) as started:
        yield started


@pytest.mark.parametrize("options", [{}, RING, {"tcp_only": True}], ids=["double", "streamed", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_updates_in_a_row(
    engine: ToyEngine, device: torch.device, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Float32 is sent as it is, float64 is cast."""
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(60), **options) as pusher:
        for version in range(1, 11):
            pusher.push(ToyTrainee(version).to(device, dtype), version=version)
            assert engine.look()["digests"] == expected_digests(version, 2)
