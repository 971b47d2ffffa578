"""Whole asynchronous saves beside a training loop that never stops using the default process group.

Every turn of the loop is a step of FSDP-2 (all-gathers and reduce-scatters of its own) with an all-reduce and a barrier
after it. A save that waited for anything of that group, or held anything that the loop needs, would end in a deadlock:
the ranks' threads run in no common order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_training import differing, memory
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import trace
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.slow

WORLD = 2
ROUNDS = 500  # each with an all-reduce and a barrier
STRIDE = 20  # turns between two saves
LAST = ROUNDS - STRIDE
HELD = 7  # turns for which each save is kept from writing
DEADLINE_S = 60.0


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


class Turns:
    """The loop's turns, which a save in the background waits for: so it is under way while collectives run."""

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
                assert self._more.wait_for(lambda: self._done >= until, DEADLINE_S), "the loop stands still"


def _train(rank: int, world_size: int, root: str, layout: Any, gate: bool) -> tuple[float, int, list[str]]:
    """The sum of all reductions, how many saves were under way while collectives ran, and what differs between what
    the last one stored and what was there when it was begun."""
    state, turns = _job(), Turns()
    _step(state)
    handles: list[bcp.SaveHandle] = []
    total, beside = torch.zeros(1), 0
    stop = trace.observe(turns.hold)
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
                    layout=layout,
                    gate=gate,
                    deadline_s=DEADLINE_S,
                )
            )
        dist.barrier()
        one = torch.full((1,), float(rank))
        dist.all_reduce(one)
        total += one
        _step(state)
        beside += number % STRIDE == 0 and not handles[-1].done()
        turns.count()
    stop()
    for handle in handles:
        handle.result(DEADLINE_S)
    loaded = _job()
    _step(loaded)
    assert bcp.load(f"{root}/step-{LAST}", loaded, deadline_s=DEADLINE_S).step == LAST
    return float(total), beside, differing(memory(loaded), at_the_call)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.mark.parametrize(("layout", "gate"), [("shards", False), ("shards", True), ("merged", False)])
def test_saves_beside_a_thousand_collectives(pool: RankPool, tmp_path: Path, layout: str, gate: bool) -> None:
    said = pool.run(_train, str(tmp_path), layout, gate, timeout_s=150)
    assert said == [(ROUNDS, ROUNDS // STRIDE, [])] * WORLD
