"""Each rank of the job has an engine in its own process, as in trainers that colocate them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyTrainee, ToyWorker, digest_of

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.inference.push import Engine, Pusher, Receiver
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as started:
        yield started


class _OwnEngine(Engine):
    """A worker in this process. So many of its loads as there are ``failures`` fail."""

    name = "the engine of this process"

    def __init__(self) -> None:
        self.worker = ToyWorker(1, 0, torch.float32)
        self._receiver = Receiver(self.worker)
        self.log: list[Any] = []

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [self._receiver.answer(request)]

    def pause(self, timeout_s: float) -> None:
        self.log.append("pause")

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self.log.append(version)


def _push(rank: int, world_size: int, failing: int | None, options: dict[str, Any]) -> list[Any]:
    """Push versions 1, 2 and 3. Return what this rank's engine serves after each push, its log, and all failures."""
    engine, served, failures = _OwnEngine(), [], []
    with Pusher(engine, deadline_s=time_limit(30), **options) as pusher:
        for version in (1, 2, 3):
            engine.worker.failures = int(rank == failing and version == 2)
            try:
                report = pusher.push(fully_shard(ToyTrainee(version)), version=version)
                assert len(report.workers) == world_size
                assert [one["version"] for of_engine in pusher.state() for one in of_engine] == [version]
            except BytecheckpointError as error:
                failures.append(f"{type(error).__name__}: {error}")
            served.append(engine.worker.model.digest())
    return [served, engine.log, failures]


def _expected(*versions: int) -> list[str]:
    return [digest_of(ToyTrainee(version), 1, 0) for version in versions]


def test_every_rank_pushes_to_its_own_engine(pool: RankPool) -> None:
    for served, log, failures in pool.run(_push, None, {}):
        assert not failures
        assert served == _expected(1, 2, 3)
        assert log == ["pause", 1, "pause", 2, "pause", 3]


@pytest.mark.parametrize("failing", [0, WORLD - 1])
def test_all_engines_return_when_that_of_one_rank_fails(pool: RankPool, failing: int) -> None:
    for served, log, failures in pool.run(_push, failing, {}):
        assert served == _expected(1, 1, 3)
        assert log == ["pause", 1, "pause", 1, "pause", 3]
        assert len(failures) == 1
        assert f"worker {failing} of the engines of the ranks" in failures[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"memory_bytes": 100_000}, "no host memory for two versions"), ({"group": "gloo"}, "a group")],
)
def test_streams_are_refused(pool: RankPool, options: dict[str, Any], text: str) -> None:
    first = _expected(0)
    for served, log, failures in pool.run(_push, None, options):
        assert served == 3 * first
        assert log == []
        assert [text in one for one in failures] == [True] * 3
