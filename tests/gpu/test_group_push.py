"""Pushes by NCCL: a sender on one device and workers on others, each in its own thread of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toy_engine import ToyTrainee, ToyWorker, expected_digests

from bytecheckpoint.errors import EngineError
from bytecheckpoint.frameworks.digests import digest_on_device
from bytecheckpoint.inference.push import Engine, Pusher
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.inference.push.transports.group import GroupBackend
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu


def test_digests_are_the_same_everywhere(device: torch.device) -> None:
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    for part in (data, data[1:], data[:7]):
        assert int(digest_on_device(part)) == int(digest_on_device(part.to(device)))


class ThreadEngine(Engine):
    """Worker ``n`` is a thread on the GPU ``devices[n]``, or on the CPU in a dry run."""

    name = "the engine"

    def __init__(self, devices: Sequence[int]) -> None:
        tp = len(devices)
        self.workers = [ToyWorker(tp, rank, torch.float32) for rank in range(tp)]
        self._receivers = [Receiver(worker) for worker in self.workers]
        self._threads = [ThreadPoolExecutor(1, initializer=_use, initargs=(gpu,)) for gpu in devices]

    def call(self, request: str, timeout_s: float) -> list[str]:
        asked = [
            thread.submit(receiver.answer, request)
            for thread, receiver in zip(self._threads, self._receivers, strict=True)
        ]
        return [one.result(timeout_s) for one in asked]

    def pause(self, timeout_s: float) -> None:
        """Do nothing: no request is running."""

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Do nothing: no request is running."""

    def end(self) -> None:
        for thread, receiver in zip(self._threads, self._receivers, strict=True):
            thread.submit(receiver.close).result()
            thread.shutdown()


def _use(gpu: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, device: torch.device) -> Iterator[ThreadEngine]:
    if device.type == "cuda" and torch.cuda.device_count() < request.param + 1:
        pytest.skip(f"needs {request.param + 1} devices")
    made = ThreadEngine(range(1, request.param + 1))
    yield made
    made.end()


@pytest.mark.parametrize("memory_bytes", [20_000, None])
def test_updates_in_a_row(engine: ThreadEngine, device: torch.device, memory_bytes: int | None) -> None:
    _use(0)
    group: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
    options = {"memory_bytes": memory_bytes, "chunk_bytes": 4096}
    with Pusher(engine, deadline_s=time_limit(60), group=group, **options) as pusher:
        for version in range(1, 6):
            pusher.push(ToyTrainee(version).to(device), version=version)
            digests = [worker.model.digest() for worker in engine.workers]
            assert digests == expected_digests(version, len(engine.workers))


def test_two_members_on_one_gpu_are_refused() -> None:
    """NCCL would fail late, or not return."""
    gpu = torch.cuda.current_device()
    engine = ThreadEngine([gpu])
    before = engine.workers[0].model.digest()
    try:
        with Pusher(engine, deadline_s=time_limit(30), group="nccl") as pusher:
            with pytest.raises(EngineError, match="members 0 and 1 share GPU"):
                pusher.push(ToyTrainee(1).cuda(), version=1)
        assert engine.workers[0].model.digest() == before
        with Pusher(engine, deadline_s=time_limit(30)) as pusher:
            pusher.push(ToyTrainee(2).cuda(), version=2)
        assert [engine.workers[0].model.digest()] == expected_digests(2, 1)
    finally:
        engine.end()
