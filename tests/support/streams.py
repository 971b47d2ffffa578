"""Pushes of a pool's ranks, and faults in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from host_device import host_device
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.inference.push import HttpEngine, Pusher, PushReport
from bytecheckpoint.inference.push.transports.base import OutgoingChunk, Transport
from bytecheckpoint.inference.push.transports.group_transport import GroupTransport
from bytecheckpoint.inference.push.transports.tcp import TcpTransport
from bytecheckpoint.testing import time_limit

__all__ = ["RING", "fail", "push_and_look", "same", "watch_sent"]

RING: dict[str, Any] = {"memory_bytes": 20_000, "chunk_bytes": 4096}
"""Options of ``Pusher``; a worker requests about 90,000 bytes."""


def push_and_look(
    rank: int, world_size: int, urls: Sequence[str], versions: Sequence[int], options: dict[str, Any]
) -> list[tuple[PushReport, list[list[str]]]]:
    """Return the report of each push, and on rank 0 the digests of each engine's workers after it."""
    found = []
    with _device(options), Pusher([HttpEngine(url) for url in urls], deadline_s=time_limit(30), **options) as pusher:
        for version in versions:
            report = pusher.push(_sharded(version, world_size), version=version)
            found.append((report, [ToyEngine(url).look()["digests"] if rank == 0 else [] for url in urls]))
    return found


def fail(
    rank: int,
    world_size: int,
    url: str,
    fault: str,
    options: dict[str, Any],
    deadline_s: float = 30.0,
    faulty: int = 1,
) -> tuple[str, str]:
    """Return the class and message of this rank's error in a push in which the third write goes wrong on the
    ``faulty`` rank. A rank that stopped is killed when the others are through."""
    pids = _pids(world_size)
    transport = GroupTransport if "group" in options else TcpTransport
    try:
        with _device(options), _third_write_goes_wrong(transport, fault if rank == faulty else ""):
            with Pusher(HttpEngine(url), deadline_s=time_limit(deadline_s), **options) as pusher:
                pusher.push(_sharded(2, world_size), version=2)
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        if fault == "SIGSTOP":
            os.kill(pids[faulty], signal.SIGKILL)
    raise AssertionError("the push did not fail")


def same(raised: Sequence[tuple[str, str]], kind: type[Exception]) -> str:
    """Check that all ranks raised the same error, and return its message."""
    assert {name for name, _ in raised} == {kind.__name__}, raised
    assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
    return raised[0][1]


def watch_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each chunk that this process sends over a connection from now on."""
    found: list[int] = []
    send = TcpTransport._send

    def spy(self: TcpTransport, parts: Sequence[bytes | memoryview]) -> None:
        found.append(sum(map(len, parts[1:])))
        send(self, parts)

    monkeypatch.setattr(TcpTransport, "_send", spy)
    return found


def _sharded(version: int, world_size: int) -> Any:
    model = ToyTrainee(version)
    return fully_shard(model) if world_size > 1 else model


def _device(options: dict[str, Any]) -> Any:
    return host_device() if options.get("cuda_ipc") else nullcontext()


def _pids(world_size: int) -> list[int]:
    found: list[int] = [0] * world_size
    torch.distributed.all_gather_object(found, os.getpid())
    return found


@contextmanager
def _third_write_goes_wrong(transport: type[Transport], fault: str) -> Iterator[None]:
    write, writes = transport.write, 0

    def wrong(self: Transport, chunks: Sequence[OutgoingChunk]) -> None:
        nonlocal writes
        for chunk in chunks:
            writes += 1
            write(self, [chunk._replace(digest=chunk.digest ^ _third(fault)) if writes == 3 else chunk])

    transport.write = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        transport.write = write  # type: ignore[method-assign]


def _third(fault: str) -> int:
    """Cause the fault, and return what is added to the digest."""
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    return int(fault == "damage")
