"""An epoch of real loaders on real ranks, saved and loaded at changing numbers of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_loaders import KINDS, SAMPLES, make_reader, take

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(2, of=__name__)

Batches = dict[str, list[list[int]]]

EPOCH = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _train(
    rank: int,
    world_size: int,
    load: str | None,
    save: str | None,
    batches: int | None,
    after: int | None = 0,
    model_parallel: int = 1,
) -> tuple[Batches, Batches, dict[str, tuple[str, str]]]:
    """Take batches of all loaders, save, and take some more. Every ``model_parallel`` ranks read the same samples."""
    place = rank // model_parallel, world_size // model_parallel
    torch.manual_seed(place[0])  # workers get equal seeds on the ranks that read the same samples
    readers = {kind: make_reader(kind, *place) for kind in KINDS}
    state = {"extra_state": {"epoch": EPOCH, "loaders": {kind: one.state(*place) for kind, one in readers.items()}}}
    resumed = {}
    if load is not None:
        resumed = bcp.load(load, state, options=bcp.LoadOptions(deadline_s=time_limit(30))).resumed
    for one in readers.values():
        one.set_epoch(state["extra_state"]["epoch"])  # type: ignore[arg-type]
    iterators = {kind: iter(one.loader) for kind, one in readers.items()}
    before = {kind: take(iterator, batches) for kind, iterator in iterators.items()}
    if save is not None:
        bcp.save(save, state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return before, {kind: take(iterator, after) for kind, iterator in iterators.items()}, resumed


def _samples(results: list[tuple[Batches, Batches, Any]], kind: str) -> list[int]:
    return [sample for before, _, _ in results for batch in before[kind] for sample in batch]


def test_an_epoch_over_4_2_3_and_1_ranks_has_every_sample_once(pool: RankPool, tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {kind: [] for kind in KINDS}
    load = None
    for stage, (ranks, batches) in enumerate([(4, 2), (2, 1), (3, 2), (1, None)]):
        save = str(tmp_path / str(stage))
        results = pool.run(_train, load, save, batches, world_size=ranks)
        load = save
        for kind in KINDS:
            part = _samples(results, kind)
            assert part, f"{kind}: nothing was read on {ranks} ranks"
            seen[kind] += part
        if stage:
            what = {f"extra_state.loaders.{kind}": "divided" for kind in KINDS}
            assert {name: of for name, (of, _) in results[0][2].items() if "workers" not in name.split(".")} == what
    for kind in KINDS:
        assert sorted(seen[kind]) == list(range(SAMPLES)), kind
        shuffled = "packing" not in kind
        assert not shuffled or seen[kind] != sorted(seen[kind]), f"{kind} was not shuffled"
    # The epoch is over.
    results = pool.run(_train, load, None, None, world_size=2)
    assert not any(_samples(results, kind) for kind in KINDS)


def test_the_same_number_of_ranks_continues_exactly(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_train, None, str(tmp_path), 2, None, world_size=2)
    resumed = pool.run(_train, str(tmp_path), None, None, world_size=2)
    for (_, expected, _), (found, _, report) in zip(results, resumed):
        assert found == expected
        whats = {name: what for name, (what, _) in report.items() if not name.endswith(".workers")}
        assert set(whats.values()) == {"continued"}
        seeds = [detail for name, (_, detail) in report.items() if name.endswith(".workers")]
        assert set(seeds) <= {"the random generators of the workers begin with their first seeds"}


def test_another_number_of_model_parallel_ranks_continues_exactly(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_train, None, str(tmp_path), 3, None, 2, world_size=4)
    resumed = pool.run(_train, str(tmp_path), None, None, world_size=2)
    assert [found for found, _, _ in resumed] == [results[0][1], results[2][1]]
    again = pool.run(_train, str(tmp_path), None, None, 0, 2, world_size=4)
    assert [found for found, _, _ in again] == [of_rank[1] for of_rank in results]
    stored = bcp.open(tmp_path).tree("extra_state")["loaders"]
    assert all(set(one["ranks"]) == {"0", "1"} for one in stored.values()), "replicas were stored"


def _epochs(rank: int, world_size: int, load: str | None, save: str | None, epochs: list[int]) -> list[Batches]:
    """Read whole epochs, and save after the last one."""
    readers = {kind: make_reader(kind, rank, world_size) for kind in KINDS if "sampler" in kind or "shards" in kind}
    state = {"loaders": {kind: one.state(rank, world_size) for kind, one in readers.items()}}
    if load is not None:
        bcp.load(load, state, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    found = []
    for epoch in epochs:
        found.append({})
        for kind, one in readers.items():
            one.set_epoch(epoch)
            found[-1][kind] = take(iter(one.loader))
    if save is not None:
        bcp.save(save, state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return found


def test_the_epoch_after_a_load_at_the_end_of_one_is_complete(pool: RankPool, tmp_path: Path) -> None:
    expected = {ranks: pool.run(_epochs, None, None, [4, 5], world_size=ranks) for ranks in (2, 3)}
    pool.run(_epochs, None, str(tmp_path), [2, 3], world_size=2)
    for ranks in (2, 3):
        assert pool.run(_epochs, str(tmp_path), None, [4, 5], world_size=ranks) == expected[ranks]
