"""Pushes that are streamed, of ranks of a pool, and what goes wrong in the middle of one."""

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
from bytecheckpoint.inference.push import HttpEngine, Pusher, PushReport, group_sending
from bytecheckpoint.inference.push.ring_road import RingRoad

__all__ = ["RING", "fail", "push_and_look", "same", "watch_sent"]

RING: dict[str, Any] = {"memory_bytes": 20_000, "chunk_bytes": 4096}
"""Options of ``Pusher``; a worker wants some 90,000 bytes."""


def push_and_look(
    rank: int, world_size: int, urls: Sequence[str], versions: Sequence[int], options: dict[str, Any]
) -> list[tuple[PushReport, list[list[str]]]]:
    """Reports, and on rank 0 the digests of each engine's workers after each push."""
    found = []
    with _device(options), Pusher([HttpEngine(url) for url in urls], deadline_s=30, **options) as pusher:
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
    """Class and message of what this rank's push raised, in whose third write or step something goes wrong on the
    ``faulty`` rank. A rank that stopped is killed when the others are through."""
    pids = _pids(world_size)
    goes_wrong = _third_step_goes_wrong if "group" in options else _third_write_goes_wrong
    try:
        with _device(options), goes_wrong(fault if rank == faulty else ""):
            with Pusher(HttpEngine(url), deadline_s=deadline_s, **options) as pusher:
                pusher.push(_sharded(2, world_size), version=2)
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        if fault == "SIGSTOP":
            os.kill(pids[faulty], signal.SIGKILL)
    raise AssertionError("the push did not fail")


def same(raised: Sequence[tuple[str, str]], kind: type[Exception]) -> str:
    """The message of all ranks."""
    assert {name for name, _ in raised} == {kind.__name__}, raised
    assert len({message.splitlines()[0] for _, message in raised}) == 1, raised
    return raised[0][1]


def watch_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of chunks that go over connections from now on, of this process's streams."""
    found: list[int] = []
    send = RingRoad._send

    def spy(road: RingRoad, chunk: int, data: bytes | memoryview, digest: int) -> None:
        found.append(len(data))
        send(road, chunk, data, digest)

    monkeypatch.setattr(RingRoad, "_send", spy)
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
def _third_write_goes_wrong(fault: str) -> Iterator[None]:
    write, writes = RingRoad.write, 0

    def wrong(road: RingRoad, place: Any, data: Any, digest: int) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            digest ^= _third(fault)
        write(road, place, data, digest)

    RingRoad.write = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        RingRoad.write = write  # type: ignore[method-assign]


@contextmanager
def _third_step_goes_wrong(fault: str) -> Iterator[None]:
    digests_of, steps = group_sending.digests_of, 0

    def wrong(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return digests_of(chunks) ^ (_third(fault) if steps == 3 else 0)

    group_sending.digests_of = wrong  # type: ignore[attr-defined]
    try:
        yield
    finally:
        group_sending.digests_of = digests_of  # type: ignore[attr-defined]


def _third(fault: str) -> int:
    """What is wrong with its digests."""
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    return int(fault == "damage")
