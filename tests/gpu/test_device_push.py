"""Weights into the memory of workers' devices by CUDA IPC: workers are processes, on one device or several."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from join_probes import until
from streams import RING, watch_sent
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import BytecheckpointError, EngineError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.transports.cuda_ipc import DeviceArena
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

DEVICES = [f"cuda:{rank % max(torch.cuda.device_count(), 1)}" for rank in range(2)]


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2, devices=DEVICES) as started:
        yield started


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return watch_sent(monkeypatch)


@pytest.mark.parametrize("options", [RING, {}], ids=["a small ring", "by default"])
@pytest.mark.parametrize("trained_on", ["cpu", "cuda"])
def test_ten_updates_in_a_row(engine: ToyEngine, sent: list[int], trained_on: str, options: dict[str, Any]) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(60), cuda_ipc=True, **options) as pusher:
        for version in range(1, 11):
            pusher.push(ToyTrainee(version).to(trained_on), version=version)
            assert engine.look()["digests"] == expected_digests(version, 2)
    assert sent
    assert not any(sent)


def test_by_tcp_into_devices(engine: ToyEngine, sent: list[int]) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(60), cuda_ipc=True, tcp_only=True, **RING) as pusher:
        pusher.push(ToyTrainee(1).cuda(), version=1)
    assert engine.look()["digests"] == expected_digests(1, 2)
    assert sum(sent) > 90_000


def _free() -> int:
    """Bytes, when processes that were killed before have given theirs back."""
    seen: list[int] = []

    def is_steady() -> bool:
        seen.append(torch.cuda.mem_get_info()[0])
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    until(is_steady, "no memory comes free")
    return seen[-1]


def test_memory_is_released() -> None:
    torch.ones(1, device="cuda").fill_(3)
    free = _free()
    for _ in range(5):
        arena = DeviceArena(64 << 20)
        assert torch.cuda.mem_get_info()[0] <= free - (64 << 20)
        arena.memory.fill_(3)
        arena.close()
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)
    with pytest.raises(EngineError, match="give Pusher less memory_bytes"):
        DeviceArena(1 << 50)
    assert int(torch.ones(3, device="cuda").sum()) == 3  # the failure does not reach torch


def test_a_worker_that_is_killed(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(20), cuda_ipc=True, **RING) as pusher:
        pusher.push(ToyTrainee(1).cuda(), version=1)
        engine.fault(1, "die in apply")
        with pytest.raises(BytecheckpointError):
            pusher.push(ToyTrainee(2).cuda(), version=2)
    assert int(torch.ones(3, device="cuda").sum()) == 3
    with toy_engine(2, devices=DEVICES) as other, Pusher(HttpEngine(other.url), cuda_ipc=True, **RING) as pusher:
        pusher.push(ToyTrainee(3).cuda(), version=3)
        assert other.look()["digests"] == expected_digests(3, 2)


def test_a_worker_that_is_stopped(engine: ToyEngine) -> None:
    stopped = engine.look()["pids"][1]  # by now its workers have their devices
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(5), cuda_ipc=True, **RING) as pusher:
        pusher.push(ToyTrainee(1).cuda(), version=1)
        engine.fault(1, "stop in apply")
        with pytest.raises(BytecheckpointError):
            pusher.push(ToyTrainee(2).cuda(), version=2)
        os.kill(stopped, signal.SIGCONT)
        until(lambda: bool(engine.look()["digests"]), "the worker answers")
        pusher.push(ToyTrainee(3).cuda(), version=3)
        assert engine.look()["digests"] == expected_digests(3, 2)
