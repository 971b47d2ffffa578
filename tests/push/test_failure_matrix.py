"""Kill or interrupt a sender, a worker or a server in every stage of a push.

Afterwards, each engine that lives serves one complete version and is not paused, without anybody's help and within the
deadline. Only an engine that has loaded a part of a stream may stay paused; the error then names the command that
repairs it. A normal run tests a sample, ``BCP_TEST_FULL=1`` every cell (about four minutes on two cores).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from join_probes import until
from sampling import sample
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, EngineError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

SAMPLE = 10
DEADLINE_S = 10.0
OPTIONS: dict[str, dict[str, Any]] = {"double": {}, "streamed": {"memory_bytes": 40_000, "chunk_bytes": 4000}}
STEPS = {
    "double": ("describe", "plan", "prepare", "write", "verify", "apply"),
    "streamed": ("describe", "plan", "prepare", "stream"),
}
INNER_POINTS = ("leased", "paused", "loaded", "resumed")
REQUESTS = {
    "double": ("describe", "prepare", "verify", "lease", "apply", "end_lease"),
    "streamed": ("describe", "prepare", "lease", "stream", "end_lease", "finish"),
}


class Cell(NamedTuple):
    mode: str
    victim: str
    fault: str
    point: str
    event: str

    def __str__(self) -> str:
        return "-".join((self.mode, self.victim.replace(" ", ""), self.fault, self.point, self.event))


def _cells() -> Iterator[Cell]:
    for mode in OPTIONS:
        steps = [(f"push.{step}", event) for step in STEPS[mode] for event in ("enter", "exit")]
        inner = [(f"push.apply.{point}", "point") for point in INNER_POINTS]
        for fault in ("kill", "interrupt"):
            for point, event in steps + inner:
                yield Cell(mode, "sender 0", fault, point, event)
            for point, event in steps:
                yield Cell(mode, "sender 1", fault, point, event)
        for request in REQUESTS[mode]:
            for event in ("enter", "exit"):
                for victim in ("worker", "server"):
                    yield Cell(mode, victim, "kill", f"push.worker.{request}", event)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ToyEngine]]:
    with toy_engine(2) as first, toy_engine(1) as second:
        yield [first, second]


def _push(urls: Sequence[str], version: int, **options: Any) -> None:
    with Pusher([HttpEngine(url) for url in urls], deadline_s=time_limit(DEADLINE_S), **options) as pusher:
        pusher.push(ToyTrainee(version), version=version)


def _fail(rank: int, world_size: int, urls: list[str], cell: Cell) -> str | None:
    """Push version 2 from this rank. Returns its error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    once = threading.Semaphore(int(cell.victim == f"sender {rank}"))  # engines have threads, which all pass a point
    remove = telemetry.observe(
        lambda *seen: _strike(cell.fault) if seen == cell[3:] and once.acquire(blocking=False) else None
    )
    model, options = fully_shard(ToyTrainee(2)), OPTIONS[cell.mode]
    try:
        with Pusher([HttpEngine(url) for url in urls], deadline_s=time_limit(DEADLINE_S), **options) as pusher:
            pusher.push(model, version=2)
    except BytecheckpointError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        remove()
    return None


def _strike(fault: str) -> None:
    os.kill(os.getpid(), signal.SIGINT if fault == "interrupt" else signal.SIGKILL)


def _served(engine: ToyEngine) -> int | None:
    """Return the complete version that an engine serves."""
    digests = engine.look()["digests"]
    return next((version for version in (1, 2) if list(digests) == expected_digests(version, len(digests))), None)


def _reasons(engine: ToyEngine) -> list[str]:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(DEADLINE_S)) as pusher:
        return [worker["inconsistent_reason"] for worker in pusher.state()[0]]


@pytest.mark.parametrize("cell", sample(list(_cells()), SAMPLE), ids=str)
def test_cell(pool: RankPool, engines: list[ToyEngine], cell: Cell) -> None:
    with contextlib.ExitStack() as stack:
        living, urls = list(engines), [engine.url for engine in engines]
        is_sender = cell.victim.startswith("sender")
        if not is_sender:
            victim = stack.enter_context(toy_engine(1))
            living, urls = living[:1], [urls[0], victim.url]
        _push(urls, 1)
        if not is_sender:
            victim.fault(0, "die at", [cell.point, cell.event, cell.victim])
        rank = int(cell.victim[-1]) if is_sender else None
        deaths = {rank: int(signal.SIGKILL)} if rank is not None and cell.fault == "kill" else {}
        errors = pool.run(_fail, urls, cell, expect_death=deaths)
        if rank is None:
            with pytest.raises(OSError):
                victim.look()
        elif cell.fault == "interrupt":
            assert errors[rank] == "interrupted"
        for engine in living:
            _check(engine, cell)
        _push([engine.url for engine in living], 3)
        for engine in living:
            assert list(engine.look()["digests"]) == expected_digests(3, len(engine.look()["digests"]))
            assert not engine.paused


def _check(engine: ToyEngine, cell: Cell) -> None:
    until(lambda: not engine.paused or any(_reasons(engine)), "settled")
    if not engine.paused:
        assert _served(engine) is not None
        return
    assert cell.mode == "streamed"
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(DEADLINE_S)) as pusher:
        with pytest.raises(EngineError, match=r"serves no consistent version(.|\n)*`bcp push CHECKPOINT --to http"):
            pusher.resume()
    assert engine.paused
