"""Saving and loading run no collectives and use none of the job's process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, build
from torch.distributed.tensor.debug import CommDebugMode

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


class Traffic:
    """Collectives while it was watched: by operation where torch dispatched them on this thread, and, from whatever
    thread, by how far the sequence number of each process group went."""

    def __init__(self) -> None:
        self.operations: dict[str, int] = {}
        self.by_group: dict[str, int] = {}
        self.new_groups = 0

    @property
    def total(self) -> int:
        return sum(self.operations.values()) + sum(self.by_group.values()) + self.new_groups


@contextmanager
def watched() -> Iterator[Traffic]:
    traffic, before = Traffic(), _sequence_numbers()
    with CommDebugMode() as mode:
        yield traffic
    after = _sequence_numbers()
    traffic.operations = {str(operation): count for operation, count in mode.get_comm_counts().items()}
    traffic.by_group = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    traffic.new_groups = len(after) - len(before)


def _sequence_numbers() -> dict[str, int]:
    groups = dist.distributed_c10d._world.pg_map
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def _save(rank: int, world_size: int, layout: str, path: str, background: bool) -> tuple[dict[str, int], ...]:
    built = build(layout, seed=1, steps=1)
    state = {
        **built.state,
        "rng": bcp.RNGState(),
        "extra_state": {"same": torch.ones(2), "own": torch.full((2,), rank)},
    }
    with watched() as saving:
        bcp.save(path, state, async_save=background).result(time_limit(60))
    state["extra_state"] = {"same": torch.zeros(2), "own": torch.zeros(2, dtype=torch.int64)}
    with watched() as loading:
        bcp.load(path, state)
    return tuple({**t.operations, **t.by_group, "new": t.new_groups} for t in (saving, loading))


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "layout",
    [
        "ddp-2",
        "fsdp1-full-orig-2",
        "fsdp1-full-flat-4",
        "fsdp1-hybrid-orig-4",
        "fsdp2-3",
        "hsdp-4",
        "tp-2",
        "fsdp2-tp-4",
    ],
)
@pytest.mark.sampled(4)
def test_no_collective_runs(layout: str, background: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    for counts in rank_pool.run(_save, layout, path, background, world_size=LAYOUTS[layout].world_size):
        assert counts == ({"new": 0}, {"new": 0})


def _control(rank: int, world_size: int, layout: str) -> list[int]:
    """Run collectives that the watch must detect."""
    model = build(layout, seed=1, steps=0).model
    actions: list[Callable[[], Any]] = [
        lambda: (
            [t.full_tensor() for t in model.state_dict().values() if hasattr(t, "full_tensor")]
            if layout.startswith("fsdp2")
            else model.state_dict()
        ),
        dist.barrier,
        lambda: dist.all_gather_object([None] * world_size, rank),
        lambda: dist.new_group(),
    ]
    seen = []
    for action in actions:
        with watched() as traffic:
            action()
        seen.append(traffic.total)
    return seen


@pytest.mark.parametrize("layout", ["fsdp1-full-orig-2", "fsdp2-2"])
def test_the_watch_sees_collectives(layout: str, rank_pool: RankPool) -> None:
    for seen in rank_pool.run(_control, layout, world_size=2):
        assert all(seen), seen
