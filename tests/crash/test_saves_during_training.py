"""Run asynchronous saves while a training loop uses the default process group without pause.

Every iteration is a step of FSDP-2 (all-gathers and reduce-scatters), an all-reduce and a barrier. The threads of the
ranks run in no common order, so a save that used this group, or held a lock that the loop needs, would deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sampling
import torch
import torch.distributed as dist
from small_training import differing, memory
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.slow

WORLD = 2
ROUNDS = 500 if sampling.is_full() else 200  # each with an all-reduce and a barrier
STRIDE = 20  # iterations between two saves
LAST = ROUNDS - STRIDE
HELD = 7  # iterations for which each save is kept from writing
DEADLINE_S = time_limit(60)


def _job() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 64), nn.ReLU(), nn.Linear(64, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra_state": {"step": 0}}


def _step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(3, 37)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


class Iterations:
    """Counts iterations, and blocks a background save for some of them so that it overlaps with collectives."""

    def __init__(self) -> None:
        self._done = 0
        self._more = threading.Condition()

    def count(self) -> None:
        with self._more:
            self._done += 1
            self._more.notify_all()

    def hold(self, name: str, event: str) -> None:
        if (name, event) == ("save.write", "enter"):
            with self._more:
                until = self._done + HELD
                assert self._more.wait_for(lambda: self._done >= until, DEADLINE_S), "the training loop has stopped"


def _train(rank: int, world_size: int, root: str, layout: Any, gate: bool) -> tuple[float, int, list[str]]:
    """Train, and return the sum of all reductions, the number of saves that overlapped with collectives, and the
    differences between the state at the call of the last save and the state that it stored."""
    state, iterations = _job(), Iterations()
    _step(state)
    handles: list[bcp.SaveHandle] = []
    total, overlapping = torch.zeros(1), 0
    stop = telemetry.observe(iterations.hold)
    for number in range(ROUNDS):
        if number % STRIDE == 0:
            state["extra_state"]["step"] = number
            at_the_call = memory(state) if number == LAST else {}
            handles.append(
                bcp.save(
                    f"{root}/step-{number}",
                    state,
                    step=number,
                    async_save=True,
                    options=bcp.SaveOptions(layout=layout, gate=gate, deadline_s=DEADLINE_S),
                )
            )
        dist.barrier()
        one = torch.full((1,), float(rank))
        dist.all_reduce(one)
        total += one
        _step(state)
        overlapping += number % STRIDE == 0 and not handles[-1].done()
        iterations.count()
    stop()
    for handle in handles:
        handle.result(DEADLINE_S)
    loaded = _job()
    _step(loaded)
    assert bcp.load(f"{root}/step-{LAST}", loaded, options=bcp.LoadOptions(deadline_s=DEADLINE_S)).step == LAST
    return float(total), overlapping, differing(memory(loaded), at_the_call)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.mark.parametrize(("layout", "gate"), [("shards", False), ("shards", True), ("merged", False)])
@pytest.mark.sampled(1)
def test_saves_during_many_collectives(pool: RankPool, tmp_path: Path, layout: str, gate: bool) -> None:
    results = pool.run(_train, str(tmp_path), layout, gate, timeout_s=150)
    assert results == [(ROUNDS, ROUNDS // STRIDE, [])] * WORLD
