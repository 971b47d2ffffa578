"""Loads of several ranks: parts of a model, and values that belong to single ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from small_training import training

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import location
from bytecheckpoint.errors import BytecheckpointError, MismatchError, StorageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import FaultRule, FaultyBackend, time_limit
from bytecheckpoint.testing.ranks import RankPool, RanksFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _save_stages(rank: int, world_size: int, path: str) -> None:
    bcp.save(
        path, {"model": {name: torch.full((3,), float(i)) for i, name in enumerate("abcd")}, "extra_state": {"s": 1}}
    )


def _load_stages(rank: int, world_size: int, path: str, names: list[str]) -> tuple[Any, ...]:
    """Each rank requests one part of the model, like a pipeline stage."""
    local = {name: torch.zeros(3) for name in names[rank::world_size]}
    try:
        report = bcp.load(
            path, {"model": local, "extra_state": {"s": 0}}, options=bcp.LoadOptions(deadline_s=time_limit(30))
        )
    except MismatchError as error:
        return str(error), sorted(error.faults)
    return {name: tensor[0].item() for name, tensor in local.items()}, report.unexpected, report.bytes_requested


def test_disjoint_targets_are_not_unexpected(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_stages, str(tmp_path), world_size=1)
    assert pool.run(_load_stages, str(tmp_path), list("abcd"), world_size=2) == [
        ({"a": 0.0, "c": 2.0}, [], 24),
        ({"b": 1.0, "d": 3.0}, [], 24),
    ]
    results = pool.run(_load_stages, str(tmp_path), list("abx"), world_size=2)
    assert results[0] == results[1], "the ranks raise different errors"
    assert [tuple(fault[:2]) for fault in results[0][1]] == [
        ("missing", "model.x"),
        ("unexpected", "model.c"),
        ("unexpected", "model.d"),
    ]


def _load_selected(rank: int, world_size: int, path: str, include: list[str]) -> Any:
    local = {name: torch.zeros(3) for name in "abcd"[rank::world_size]}
    try:
        return bcp.load(
            path, {"model": local}, include=include, strict=False, options=bcp.LoadOptions(deadline_s=time_limit(30))
        ).loaded
    except MismatchError as error:
        return error.faults


def test_a_pattern_may_match_on_one_rank_only(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_stages, str(tmp_path), world_size=1)
    bcp.save(tmp_path / "ab", {"model": {name: torch.ones(3) for name in "ab"}})
    assert pool.run(_load_selected, str(tmp_path / "ab"), ["model.a", "model.d"], world_size=2) == [["model.a"], []]
    fault = ("pattern", "model.e", "include")
    assert pool.run(_load_selected, str(tmp_path), ["model.a", "model.e"], world_size=2) == [[fault], [fault]]


def _save_training(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, training(1.0, steps=2, shard=True), options=bcp.SaveOptions(deadline_s=time_limit(30)))


def _fail_to_read(rank: int, world_size: int, path: str, failing: int, shared: str) -> Any:
    state = training(9.0, steps=0, shard=True)
    schedule = torch.optim.lr_scheduler.StepLR(state["optimizer"], 3)
    del state["extra_state"]["table"]  # tensors may have changed
    before = copy.deepcopy((state["extra_state"], state["optimizer"].param_groups[0]["lr"], schedule.state_dict()))

    def open_failing(url: str, **options: Any) -> FaultyBackend:
        rule = FaultRule("read_into", "*optimizer*.safetensors", times=None, error=StorageError("the disk is gone"))
        return FaultyBackend(open_backend(url, **options), [rule])

    patched = mock.patch.object(location, "open_backend", open_failing if rank == failing else open_backend)
    with patched, pytest.raises(BytecheckpointError, match="the disk is gone") as caught:
        bcp.load(
            path,
            state,
            exclude=["extra_state.table"],
            options=bcp.LoadOptions(share_reads=shared, deadline_s=time_limit(30)),
        )  # type: ignore[arg-type]
    after = (state["extra_state"], state["optimizer"].param_groups[0]["lr"], schedule.state_dict())
    assert after == before
    assert not state["optimizer"].state, "the optimizer got state"
    # The next load works, in the same processes.
    bcp.load(path, state, exclude=["extra_state.table"], options=bcp.LoadOptions(deadline_s=time_limit(30)))
    assert state["extra_state"]["step"] == 1
    assert len(state["optimizer"].state) == 4
    return str(caught.value)


@pytest.mark.parametrize("shared", ["never", "always"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_failed_read_leaves_values_and_optimizers_of_all_ranks(
    pool: RankPool, tmp_path: Path, failing: int, shared: str
) -> None:
    pool.run(_save_training, str(tmp_path), world_size=2)
    messages = pool.run(_fail_to_read, str(tmp_path), failing, shared, world_size=3)
    assert len(set(messages)) <= 2  # the failing rank has the original error


def _per_rank_state(rank: int, policy: str | None) -> dict[str, Any]:
    held: Any = {"number": rank, "buffer": torch.full((2,), float(rank))}
    return {"extra_state": {"own": bcp.PerRank(held, policy) if policy else held, "shared": 5}}


def _save_per_rank(rank: int, world_size: int, path: str, declared: bool) -> None:
    bcp.save(
        path, _per_rank_state(rank, "error" if declared else None), options=bcp.SaveOptions(deadline_s=time_limit(30))
    )


def _load_per_rank(rank: int, world_size: int, path: str, policy: str | None, option: str) -> Any:
    state = _per_rank_state(-1, policy)
    try:
        report = bcp.load(path, state, options=bcp.LoadOptions(per_rank=option, deadline_s=time_limit(30)))
    except MismatchError as error:
        return sorted({name for kind, name, _ in error.faults if kind == "per_rank"}), str(error)
    own = state["extra_state"]["own"]
    held = own.value if policy else own
    assert state["extra_state"]["shared"] == 5
    assert not report.missing
    assert not report.unexpected
    assert held["buffer"].tolist() == [held["number"]] * 2
    return held["number"]


@pytest.mark.parametrize("declared", [True, False], ids=["PerRank", "merely different"])
def test_values_of_single_ranks(pool: RankPool, tmp_path: Path, declared: bool) -> None:
    """``PerRank`` in the target has its own policy; for other values that differ, the option of ``load`` applies."""
    path = str(tmp_path)
    pool.run(_save_per_rank, path, declared, world_size=2)
    run = pool.run
    assert run(_load_per_rank, path, "error" if declared else None, "error", world_size=2) == [0, 1]
    for policy, by_rank in (("lowest", [0, 0, 0, 0]), ("modulo", [0, 1, 0, 1]), ("skip", [-1, -1, -1, -1])):
        ours, option = (policy, "error") if declared else (None, policy)
        for size in (1, 3, 4):
            assert run(_load_per_rank, path, ours, option, world_size=size) == by_rank[:size], (policy, size)
    for size in (1, 4):
        results = run(_load_per_rank, path, "error" if declared else None, "error", world_size=size)
        assert {"extra_state.own.buffer", "extra_state.own.number"} <= set(results[0][0])
        assert f"saved by 2 rank(s), loaded by {size}" in results[0][1]
        assert "per_rank='lowest', 'modulo' or 'skip'" in results[0][1]
        assert all(one == results[0] for one in results)


def _unwanted_per_rank(rank: int, world_size: int, path: str) -> list[str]:
    try:
        bcp.load(path, {"extra_state": {"shared": 0}}, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    except MismatchError as error:
        return sorted(name for _, name, _ in error.faults)
    return []


def test_unused_values_of_single_ranks_are_unexpected(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_per_rank, str(tmp_path), True, world_size=2)
    expected = ["extra_state.own.buffer", "extra_state.own.number"]
    assert pool.run(_unwanted_per_rank, str(tmp_path), world_size=2) == [expected, expected]


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _load_other_shapes(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"own": bcp.PerRank({"seen": torch.zeros(3 + rank)}), "rest": {"table": torch.zeros(2)}})
    bcp.load(path, {"own": bcp.PerRank({"seen": torch.zeros(9)}), "rest": {"table": torch.zeros(3)}})


def test_shapes_of_single_ranks_are_one_line(pool: RankPool, tmp_path: Path) -> None:
    """The message has each name once, and the advice for the sections in question."""
    with pytest.raises(RanksFailed) as raised:
        pool.run(_load_other_shapes, str(tmp_path / "a"), world_size=2)
    text = str(raised.value)
    assert "strict={'own': 'skip_mismatched', 'rest': 'skip_mismatched'}" in text
    assert "own.seen: stored [3], requested [9]; and stored [4], requested [9]\n" in text
    assert "shape: 2 " in text


def _save_rng(rank: int, world_size: int, path: str) -> list[float]:
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    torch.manual_seed(100 + rank)
    bcp.save(path, {"rng": bcp.RNGState(), "extra_state": {"x": 1}}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return _draw()


def _load_rng(rank: int, world_size: int, path: str, on_resize: str) -> list[float] | str:
    random.seed(5)
    try:
        bcp.load(path, {"rng": bcp.RNGState(on_resize)}, options=bcp.LoadOptions(deadline_s=time_limit(30)))  # type: ignore[arg-type]
    except bcp.errors.BytecheckpointError as error:
        return str(error)
    return _draw()


def test_random_generators(pool: RankPool, tmp_path: Path) -> None:
    """The same ranks draw the same numbers; at another world size the target's policy applies."""
    path = str(tmp_path)
    drawn = pool.run(_save_rng, path, world_size=2)
    assert drawn[0] != drawn[1]
    for policy in ("error", "reseed", "lowest"):
        assert pool.run(_load_rng, path, policy, world_size=2) == drawn
    assert pool.run(_load_rng, path, "lowest", world_size=3) == [drawn[0]] * 3
    fresh = pool.run(_load_rng, path, "reseed", world_size=3)
    assert fresh == pool.run(_load_rng, path, "reseed", world_size=3), "a second load draws other numbers"
    assert len({tuple(one) for one in [*fresh, *drawn]}) == 5, "two ranks draw the same numbers"
    refused = pool.run(_load_rng, path, "error", world_size=1)
    assert "saved by 2 rank(s), loaded by 1" in refused[0]
