"""Host memory from and to which devices copy during a push is registered with CUDA, here with a stand-in for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cuda_runtime import Runtime, stand_in_runtime
from toy_engine import ToyTrainee, ToyWorker, expected_digests

from bytecheckpoint.inference.push import Engine, Pusher, writing
from bytecheckpoint.inference.push.quantizer import Quantizer
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.inference.push.sources import StateSource
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena
from bytecheckpoint.testing import time_limit

SENDER, WORKER = 2, torch.device("cuda", 3)
STREAMED = {"memory_bytes": 20_000, "chunk_bytes": 4096}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return stand_in_runtime(monkeypatch)


class _OnDevice(torch.Tensor):
    """A tensor of the host that claims to be on the sender's device."""

    is_cuda = True
    device = torch.device("cuda", SENDER)


class _Engine(Engine):
    """One worker in this process. ``pinned`` notes at each load whether the worker's memory was registered."""

    name = "the engine"

    def __init__(self, runtime: Runtime, device: torch.device | None) -> None:
        self.worker, self.pinned = ToyWorker(1, 0, torch.float32), list[bool]()
        self.receiver, self._runtime, self._load = Receiver(self.worker, device=device), runtime, self.worker.load
        self.worker.load = self._watched_load  # type: ignore[method-assign]

    def _watched_load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        ring, version = self.receiver._ring, self.receiver._versions.next
        assert version is not None
        memory = version.memory if ring is None else ring._memory.memory
        self.pinned.append(self._runtime.is_pinned(memory))
        self._load(weights)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [self.receiver.answer(request)]

    def pause(self, timeout_s: float) -> None:
        """Do nothing: no request is running."""

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Do nothing: no request is running."""

    def push(self, versions: Sequence[int], **options: Any) -> None:
        with Pusher(self, deadline_s=time_limit(60), **options) as pusher:
            for version in versions:
                pusher.push(ToyTrainee(version), version=version)
                assert [self.worker.model.digest()] == expected_digests(version, 1)


@pytest.fixture
def scratch(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Put the sender's tensors on its device. Notes for each chunk whether the memory that it gets was registered."""
    found: list[bool] = []
    fetch, fill = StateSource.fetch, Quantizer.fill

    def watched(self: Quantizer, out: torch.Tensor, elements: torch.Tensor, write: Any) -> None:
        found.append(runtime.is_pinned(out))
        fill(self, out, elements.as_subclass(torch.Tensor), write)

    monkeypatch.setattr(StateSource, "fetch", lambda *given: [one.as_subclass(_OnDevice) for one in fetch(*given)])
    monkeypatch.setattr(Quantizer, "fill", watched)
    monkeypatch.setattr(writing, "synchronize", lambda tensors: None)
    return found


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["double", "streamed"])
def test_memory_of_workers_and_senders(runtime: Runtime, scratch: list[bool], options: dict[str, Any]) -> None:
    engine = _Engine(runtime, WORKER)
    engine.push([1, 2, 3], **options)
    assert engine.pinned == [True] * 3
    assert scratch
    assert all(scratch)
    assert {device for call, device in runtime.calls} == {SENDER, WORKER.index}
    engine.receiver.close()
    gc.collect()
    assert runtime.registered == {}
    assert len(runtime.calls) % 2 == 0  # everything was registered and unregistered once


def test_without_memory_that_can_be_locked(runtime: Runtime, scratch: list[bool]) -> None:
    runtime.code = 2
    engine = _Engine(runtime, WORKER)
    engine.push([1, 2])
    assert engine.pinned == [False] * 2
    assert not any(scratch)
    assert runtime.last_error == 0
    engine.receiver.close()
    assert "unregister" not in [call for call, _ in runtime.calls]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_without_devices(runtime: Runtime, device: torch.device | None) -> None:
    engine = _Engine(runtime, device)
    engine.push([1, 2])
    engine.receiver.close()
    assert runtime.calls == []


def test_an_arena_that_is_dropped(runtime: Runtime) -> None:
    arena = SharedArena(10_000, WORKER)
    part = arena.memory[:100]
    assert runtime.is_pinned(part)
    del arena
    gc.collect()
    assert runtime.registered == {}
    part.fill_(3)  # it is still mapped
