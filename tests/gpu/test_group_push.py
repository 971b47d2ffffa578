"""Pushes by NCCL: a sender on one device and workers on others, each in its own thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toy_engine import ToyTrainee, ToyWorker, expected_digests

from bytecheckpoint.inference.push import Engine, Pusher
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.inference.push.transports.base import digest_on_device
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_digests_are_the_same_everywhere() -> None:
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    for part in (data, data[1:], data[:7]):
        assert int(digest_on_device(part)) == int(digest_on_device(part.cuda()))


class ThreadEngine(Engine):
    """Worker ``n`` is a thread that has device ``n + 1``."""

    name = "the engine"

    def __init__(self, tp: int) -> None:
        self.workers = [ToyWorker(tp, rank, torch.float32) for rank in range(tp)]
        self._receivers = [Receiver(worker) for worker in self.workers]
        self._threads = [ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(n + 1,)) for n in range(tp)]

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


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[ThreadEngine]:
    if torch.cuda.device_count() < request.param + 1:
        pytest.skip(f"needs {request.param + 1} devices")
    made = ThreadEngine(request.param)
    yield made
    made.end()


@pytest.mark.parametrize("memory_bytes", [20_000, None])
def test_updates_in_a_row(engine: ThreadEngine, memory_bytes: int | None) -> None:
    torch.cuda.set_device(0)
    tp = len(engine.workers)
    with Pusher(engine, deadline_s=time_limit(60), memory_bytes=memory_bytes, chunk_bytes=4096, group="nccl") as pusher:
        for version in range(1, 6):
            pusher.push(ToyTrainee(version).cuda(), version=version)
            assert [worker.model.digest() for worker in engine.workers] == expected_digests(version, tp)
