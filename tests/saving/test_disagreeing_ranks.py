"""Ranks that save or load different things: every rank raises the same, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import keys_of
from torch import nn

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
    try:
        bcp.save(path, state, **options)
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _load_disagreeing(rank: int, world_size: int, root: str) -> tuple[str, str]:
    try:
        bcp.load(f"{root}/checkpoint-{rank}", {"extra_state": {}}, deadline_s=time_limit(30))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def _disagree_on_contents(rank: int, world_size: int, root: str) -> tuple[str, str]:
    """One parameter with two shapes."""
    try:
        bcp.save(f"{root}/checkpoint", {"model": nn.Linear(2 + rank, 1)}, deadline_s=time_limit(30))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _fail_on_one(rank: int, world_size: int, root: str) -> tuple[str, str, int]:
    try:
        bcp.save(f"{root}/checkpoint", {"extra_state": {"f": print if rank == 1 else 1}}, deadline_s=time_limit(30))
    except bcp.errors.BytecheckpointError as error:
        results = type(error).__name__, str(error)
    else:
        results = "saved", ""
    bcp.save(f"{root}/next", {"extra_state": {"value": 4}}, deadline_s=time_limit(30))
    return (*results, _value(Path(root) / "next"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("what", ["path", "step", "sections", "chunk size"])
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
    }[what]
    assert all(part in message for part in expected), message
    assert re.search(r"\brank", message)
    assert keys_of(tmp_path) == [], "something was written"


def test_loads_that_disagree(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_load_disagreeing, str(tmp_path))
    assert {kind for kind, _ in results} == {"DisagreementError"}, results


def test_one_name_with_two_shapes(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_disagree_on_contents, str(tmp_path))
    assert results[0][0] == results[1][0] == "PlanError", results
    for part in ("model.weight", "[1, 2]", "[1, 3]", "rank 0", "rank 1"):
        assert all(part in message for _, message in results), results
    assert keys_of(tmp_path) == []


def test_a_state_that_one_rank_cannot_store(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_fail_on_one, str(tmp_path))
    assert {kind for kind, *_ in results} == {"UnserializableError"}, results
    assert all("extra_state.f" in message for _, message, _ in results)
    assert [value for *_, value in results] == [4, 4]
    assert not (tmp_path / "checkpoint").exists()
