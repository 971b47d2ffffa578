"""A failed transfer releases its mapped memory at once, without a garbage collection."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import sender as sender_module
from bytecheckpoint.inference.push.layout import ChunkTarget, Write
from bytecheckpoint.inference.push.messages import SenderLost, Table
from bytecheckpoint.inference.push.peer_source import _Transfer
from bytecheckpoint.inference.push.sender import PushAssignment, Sender
from bytecheckpoint.inference.push.sources import PushSource
from bytecheckpoint.inference.push.transports.base import OutgoingChunk, Transport
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box

FLOAT32 = find_dtype("float32")
WRITES = [Write(f"w{n}", Box((0,), (64,)), FLOAT32, (ChunkTarget(0, n),)) for n in range(6)]


class Mapped(PushSource):
    def __init__(self) -> None:
        self.table, self.held = Table(()), []
        self.memory = torch.ones(64)

    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        return [self.memory[:] for _ in boxes]


class Broken(Transport):
    """Breaks in all threads at once, like a connection."""

    def __init__(self) -> None:
        self._all = threading.Barrier(2, timeout=1.0)

    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        try:
            self._all.wait()
            raise BrokenPipeError("broken pipe")
        except (OSError, threading.BrokenBarrierError):
            self.finish()

    def finish(self) -> None:
        raise EngineError("the other end has gone")

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_transport_that_breaks_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_RUN_BYTES", 1)  # each thread writes one chunk at once
    for _ in range(10):
        source = Mapped()
        memory = weakref.ref(source.memory)
        give = _Transfer(None, source, 60.0)  # type: ignore[arg-type]
        del source
        _begin(give, _Mapping(60.0, tcp_only=False))
        with pytest.raises(EngineError, match="the other end has gone"):
            _wait_for(give)
        give.join()
        assert memory() is None


class _Mapping(Sender):
    """Maps the memory of the target, which breaks."""

    def shared_memory(self, assignment: PushAssignment) -> dict[int, Transport]:
        return {0: Broken()}


class _Unreachable(Sender):
    """Finds the ports of all targets closed."""

    def shared_memory(self, assignment: PushAssignment) -> dict[int, Transport]:
        return {}

    def connect(self, assignment: PushAssignment, target: int) -> Any:
        raise EngineError("port 1 cannot be reached")


def test_a_target_that_closes_its_port_is_a_consequence() -> None:
    give = _Transfer(None, Mapped(), 60.0)  # type: ignore[arg-type]
    _begin(give, _Unreachable(60.0, tcp_only=False))
    with pytest.raises(SenderLost, match="port 1 cannot be reached"):
        _wait_for(give)
    give.join()


def _begin(give: _Transfer, sender: Sender) -> None:
    sender.writes = WRITES
    known = [(None, None)] * len(WRITES)
    assignment = PushAssignment([None], [], [], [], on_device=False, is_group=False, known=known)
    give.begin(sender, assignment)


def _wait_for(give: _Transfer) -> None:
    while give.outcome() is None:
        time.sleep(0.001)
