"""Ranks that save or load different things: every rank raises the same, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import keys_of
from sorted_arguments import saving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


def _value(path: Path) -> int:
    """What is committed at ``path``."""
    return int(bcp.open(path).section_values("extra_state")[("value",)])


def _disagree(rank: int, world_size: int, root: str, what: str) -> tuple[str, str]:
    options: dict[str, Any] = {"step": 1, "deadline_s": 30}
    state: dict[str, Any] = {"extra_state": {"value": rank}}
    path = f"{root}/checkpoint"
    if what == "path" and rank == 1:
        path = f"{root}/elsewhere"
    if what == "step":
        options["step"] = 10 + rank
    if what == "sections" and rank == 1:
        state["more"] = {"value": 1}
    if what == "chunk size":
        options["chunk_size"] = 1024 * (rank + 1)
    if what == "metadata":
        options["metadata"] = {
            "loss": {"train": 0.5 + rank, **({"a": 1} if rank else {})},
            "long": "x" * 200 + str(rank),
        }
    try:
        bcp.save(path, state, **saving(**options))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _load_disagreeing(rank: int, world_size: int, root: str) -> tuple[str, str]:
    try:
        bcp.load(f"{root}/checkpoint-{rank}", {"extra_state": {}}, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def _disagree_on_contents(rank: int, world_size: int, root: str) -> tuple[str, str]:
    """One parameter with two shapes."""
    try:
        bcp.save(
            f"{root}/checkpoint", {"model": nn.Linear(2 + rank, 1)}, options=bcp.SaveOptions(deadline_s=time_limit(30))
        )
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _disagree_on_a_global_shape(rank: int, world_size: int, root: str, order: tuple[int, int]) -> tuple[str, str]:
    """Each rank holds its half of a DTensor of another global shape, which its own description tiles."""
    mesh = init_device_mesh("cpu", (world_size,))
    rows = (4, 6)[order[rank]]
    weight = DTensor.from_local(
        torch.ones(rows // 2, 3), mesh, [Shard(0)], run_check=False, shape=(rows, 3), stride=(3, 1)
    )
    try:
        bcp.save(f"{root}/checkpoint", {"model": {"w": weight}}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _fail_on_one(rank: int, world_size: int, root: str) -> tuple[str, str, int]:
    try:
        bcp.save(
            f"{root}/checkpoint",
            {"extra_state": {"f": print if rank == 1 else 1}},
            options=bcp.SaveOptions(deadline_s=time_limit(30)),
        )
    except bcp.errors.BytecheckpointError as error:
        results = type(error).__name__, str(error)
    else:
        results = "saved", ""
    bcp.save(f"{root}/next", {"extra_state": {"value": 4}}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return (*results, _value(Path(root) / "next"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("what", ["path", "step", "sections", "chunk size", "metadata"])
def test_ranks_that_disagree(pool: RankPool, tmp_path: Path, what: str) -> None:
    results = pool.run(_disagree, str(tmp_path), what)
    assert {kind for kind, _ in results} == {"DisagreementError"}, results
    assert results[0] == results[1]
    message = results[0][1]
    assert what in message
    expected = {
        "path": ["elsewhere", "/checkpoint"],
        "step": ["10", "11"],
        "sections": ["extra_state, more"],
        "chunk size": ["1024", "2048"],
        "metadata": ["metadata['loss']", "0.5", "1.5", "metadata['long']"],
    }[what]
    assert all(part in message for part in expected), message
    assert re.search(r"\brank", message)
    assert keys_of(tmp_path) == [], "something was written"


def _agree_in_another_order(rank: int, world_size: int, root: str) -> str:
    metadata = {"a": {"x": 1, "y": [float("nan")]}, "b": "z" * 1000}
    if rank:
        metadata = {"b": "z" * 1000, "a": {"y": [float("nan")], "x": 1}}
    return bcp.save(f"{root}/checkpoint", {"extra_state": {"value": 1}}, metadata=metadata).url


def test_the_order_of_metadata_does_not_matter(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_agree_in_another_order, str(tmp_path)) == [str(tmp_path / "checkpoint")] * 2


def test_loads_that_disagree(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_load_disagreeing, str(tmp_path))
    assert {kind for kind, _ in results} == {"DisagreementError"}, results


def test_one_name_with_two_shapes(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_disagree_on_contents, str(tmp_path))
    assert results[0][0] == results[1][0] == "ReplicaMismatchError", results
    for part in ("model.weight: rank(s) 0 hold", "of float32[1, 2]", "rank(s) 1 hold", "of float32[1, 3]"):
        assert all(part in message for _, message in results), results
    assert keys_of(tmp_path) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["larger last", "larger first"])
def test_one_name_with_two_global_shapes(pool: RankPool, tmp_path: Path, order: tuple[int, int]) -> None:
    results = pool.run(_disagree_on_a_global_shape, str(tmp_path), order)
    assert results[0] == results[1]
    assert results[0][0] == "PlanError", results
    first, second = (("float32[4, 3]", "float32[6, 3]")[which] for which in order)
    assert f"model.w: {first} in section 'model' on rank 0; {second} in section 'model' on rank 1" in results[0][1]
    assert keys_of(tmp_path) == []


def test_a_state_that_one_rank_cannot_store(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_fail_on_one, str(tmp_path))
    assert {kind for kind, *_ in results} == {"UnserializableError"}, results
    assert all("extra_state.f" in message for _, message, _ in results)
    assert [value for *_, value in results] == [4, 4]
    assert not (tmp_path / "checkpoint").exists()
