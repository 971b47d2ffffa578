"""Kill or interrupt a sender, a worker or a server in every stage of a push or rollback.

Afterwards, each engine that lives serves one complete version and is not paused, without anybody's help and within the
deadline. An engine that has loaded a part of a stream, or that cannot return to the version before when another engine
does not have the new one, may stay paused; the errors then name the command that repairs it. A normal run tests a
sample, ``BCP_TEST_FULL=1`` every cell (about ten minutes on two cores).
"""

from __future__ import annotations

import contextlib
import logging
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

pytestmark = pytest.mark.sampled(3, of=__name__)

SAMPLE = 8
DEADLINE_S = 10.0
OPTIONS: dict[str, dict[str, Any]] = {
    "double": {},
    "streamed": {"memory_bytes": 40_000, "chunk_bytes": 4000},
    "rollback": {},
}
STEPS = {
    "double": ("describe", "plan", "prepare", "write", "verify", "apply"),
    "streamed": ("describe", "plan", "prepare", "stream"),
    "rollback": (),
}
INNER_POINTS = ("leased", "paused", "loaded", "resumed")
REQUESTS = {
    "double": ("describe", "prepare", "verify", "lease", "apply", "status", "end_lease"),
    "streamed": ("describe", "prepare", "lease", "stream", "status", "end_lease", "finish"),
    "rollback": ("state", "lease", "rollback", "status", "end_lease"),
}
PIDS = {"worker": 0, "server": 1}


class Cell(NamedTuple):
    mode: str
    victim: str
    fault: str
    point: str
    event: str

    def __str__(self) -> str:
        return "-".join((self.mode, self.victim.replace(" ", ""), *self[2:]))


def _cells() -> Iterator[Cell]:
    for mode in OPTIONS:
        steps = [(f"push.{step}", event) for step in STEPS[mode] for event in ("enter", "exit")]
        inner = [(f"push.apply.{point}", "point") for point in INNER_POINTS]
        requests = [(f"push.worker.{request}", event) for request in REQUESTS[mode] for event in ("enter", "exit")]
        for fault in ("kill", "interrupt"):
            # Those of workers are inside a request that the sender waits for.
            for point, event in steps + inner + requests:
                yield Cell(mode, "sender 0", fault, point, event)
            for point, event in steps:
                yield Cell(mode, "sender 1", fault, point, event)
        for point, event in requests:
            for victim in PIDS:
                yield Cell(mode, victim, "kill", point, event)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ToyEngine]]:
    with toy_engine(2) as first, toy_engine(1) as second:
        yield [first, second]


def _pusher(urls: Sequence[str], cell: Cell) -> Pusher:
    engines = [HttpEngine(url) for url in urls]
    return Pusher(engines, deadline_s=time_limit(DEADLINE_S), **OPTIONS[cell.mode])


def _fail(rank: int, world_size: int, urls: list[str], cell: Cell) -> str | None:
    """Push version 2, or roll back to version 1, from this rank. Returns its error, or what it logged when it was
    interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    number = signal.SIGINT if cell.fault == "interrupt" else signal.SIGKILL
    is_victim = cell.victim == f"sender {rank}"
    if is_victim and cell.point.startswith("push.worker."):
        ToyEngine(urls[-1]).fault(0, "signal at", [cell.point, cell.event, os.getpid(), number])
    once = threading.Semaphore(int(is_victim))  # engines have threads, which all pass a point
    remove = telemetry.observe(
        lambda *seen: (
            os.kill(os.getpid(), number) if seen == (cell.point, cell.event) and once.acquire(blocking=False) else None
        )
    )
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bytecheckpoint").addHandler(handler)
    model = fully_shard(ToyTrainee(2))
    try:
        with _pusher(urls, cell) as pusher:
            if cell.mode != "rollback":
                pusher.push(model, version=2)
            elif rank == 0:
                pusher.rollback()
    except BytecheckpointError as error:
        return str(error)
    except KeyboardInterrupt:
        return "\n".join(("interrupted", *logged))
    finally:
        remove()
        logging.getLogger("bytecheckpoint").removeHandler(handler)
    return None


def _served(engine: ToyEngine) -> int | None:
    """Return the complete version that an engine serves."""
    digests = engine.look()["digests"]
    return next((version for version in (1, 2) if list(digests) == expected_digests(version, len(digests))), None)


def _is_inconsistent(engine: ToyEngine) -> bool:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(DEADLINE_S)) as pusher:
        return any(worker["inconsistent_reason"] for worker in pusher.state()[0])


@pytest.mark.parametrize("cell", sample(list(_cells()), SAMPLE), ids=str)
def test_cell(pool: RankPool, engines: list[ToyEngine], cell: Cell) -> None:
    with contextlib.ExitStack() as stack:
        living, urls = list(engines), [engine.url for engine in engines]
        is_sender = cell.victim.startswith("sender")
        if not is_sender:
            victim = stack.enter_context(toy_engine(1))
            living, urls = living[:1], [urls[0], victim.url]
        with _pusher(urls, cell) as pusher:
            for version in (1, 2) if cell.mode == "rollback" else (1,):
                pusher.push(ToyTrainee(version), version=version)
        if not is_sender:
            victim.fault(0, "signal at", [cell.point, cell.event, PIDS[cell.victim], signal.SIGKILL])
        rank = int(cell.victim[-1]) if is_sender else None
        deaths = {rank: int(signal.SIGKILL)} if rank is not None and cell.fault == "kill" else {}
        errors = pool.run(_fail, urls, cell, expect_death=deaths)
        for engine in living:
            engine.fault(0, "signal at")
        if rank is None:
            with pytest.raises(OSError):
                victim.look()
        elif cell.fault == "interrupt":
            assert str(errors[rank]).startswith("interrupted")
        # The ranks that know how their engines are.
        knowing = {0, 1} - {rank} if cell.mode != "rollback" else {0} - {rank}
        if cell.fault == "interrupt" and rank == 0:
            knowing = {0}
        elif rank == 0:
            knowing = set()
        known = [errors[one] for one in knowing]
        for error in known if rank is None else ():
            assert error is None or victim.url in error.splitlines()[0]
        for engine in living:
            _check(engine, cell, known)
        with _pusher([engine.url for engine in living], cell) as pusher:
            pusher.push(ToyTrainee(3), version=3)
        for engine in living:
            assert list(engine.look()["digests"]) == expected_digests(3, len(engine.look()["digests"]))
            assert not engine.paused


def _check(engine: ToyEngine, cell: Cell, errors: Sequence[str | None]) -> None:
    may_stay = cell.mode == "streamed" or (cell.mode == "rollback" and cell.victim in PIDS)
    stays = [f"{engine.url} has version" in str(error) for error in errors]
    until(lambda: not engine.paused or _is_inconsistent(engine) or any(stays), "resolved")
    if not engine.paused:
        assert _served(engine) is not None
        return
    assert may_stay
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(DEADLINE_S)) as pusher:
        if _is_inconsistent(engine):
            command = f"`bcp push CHECKPOINT --to {engine.url}`"
            with pytest.raises(EngineError, match=r"serves no consistent version(.|\n)*`bcp push CHECKPOINT --to http"):
                pusher.resume()
            assert engine.paused
        else:
            command = f"`bcp push --resume {engine.url}"
            assert pusher.resume() == [_served(engine)]
            assert not engine.paused
    assert all(command in str(error) for error in errors)
