"""SIGKILL at every named step while an existing checkpoint is overwritten: a load finds the old or the new, whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import trace
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.testing.ranks import RankPool

WORLD = 2
ROWS, COLUMNS = 7, 5

# Every step of the protocol, and the points inside the two steps that touch storage.
POINTS = [f"save.{step}" for step in trace.SAVE_STEPS] + [
    "save.write.file",
    "save.write.complete",
    "save.commit.before",
    "save.commit.after",
]
# From here on the manifest is in place.
AFTER_COMMIT = {"save.commit.after", "save.clean"}


def _model(value: float) -> nn.Module:
    model = nn.Linear(COLUMNS, ROWS)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return fully_shard(model)


def _save(rank: int, world_size: int, path: str, value: float) -> None:
    bcp.save(path, {"model": _model(value), "extra_state": {"value": value}}, step=int(value), deadline_s=60)


def _layout(point: str) -> Any:
    """Saves have a merge stage where tensors are stored whole."""
    return "whole" if point.startswith("save.merge") else "shards"


def _save_and_die(rank: int, world_size: int, path: str, value: float, point: str, victim: int, use_async: bool) -> str:
    def kill(name: str, event: str) -> None:
        if rank == victim and name == point and event in ("enter", "point"):
            os.kill(os.getpid(), signal.SIGKILL)

    _save(rank, world_size, path, 1.0)
    # Rank 0 is done a moment before the others have read that it is; it must not die in that moment.
    dist.barrier()
    trace.observe(kill)
    try:
        handle = bcp.save(
            path,
            {"model": _model(value), "extra_state": {"value": value}},
            step=int(value),
            async_save=use_async,
            layout=_layout(point),
            deadline_s=30,
        )
        handle.result(60)
    except bcp.errors.BytecheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def _check_whole(path: str) -> float:
    """The one value that everything in the checkpoint has."""
    checkpoint = bcp.open(path)
    assert checkpoint.verify().ok
    model = nn.Linear(COLUMNS, ROWS)
    extra: dict[str, float] = {}
    report = bcp.load(path, {"model": model, "extra_state": extra})
    values = {*model.weight.flatten().tolist(), *model.bias.tolist(), extra["value"], float(report.step or 0)}
    assert len(values) == 1, f"a mixture of {values}"
    return values.pop()


@pytest.fixture(scope="module")
def pool():
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
@pytest.mark.parametrize("point", POINTS)
def test_overwrite_is_all_or_nothing(pool: RankPool, tmp_path: Path, point: str, victim: int, use_async: bool) -> None:
    if victim != 0 and point.startswith("save.commit."):
        pytest.skip("only rank 0 puts the manifest")
    path = str(tmp_path / "checkpoint")
    said = pool.run(_save_and_die, path, 2.0, point, victim, use_async, expect_death={victim: signal.SIGKILL})
    found = _check_whole(path)
    if point in AFTER_COMMIT and victim == 0:
        assert found == 2.0
    elif point not in ("save.clean", "save.commit"):
        assert found == 1.0
    survivor = said[1 - victim]
    harmless = {"save.clean"} if victim == 0 else {"save.clean", "save.commit"}
    if point == "save.commit.after":
        assert survivor == "saved", "the checkpoint exists, and a survivor can see that it does"
    elif point not in harmless:
        assert survivor.startswith("RankFailedError"), survivor
        assert f"rank {victim}" in survivor
    # The next job saves to the same place, and what it saves is what is there.
    pool.run(_save, path, 3.0)
    assert _check_whole(path) == 3.0


def _die_first(rank: int, world_size: int, path: str) -> None:
    def kill(name: str, event: str) -> None:
        if rank == 0 and name == "save.commit":
            os.kill(os.getpid(), signal.SIGKILL)

    trace.observe(kill)
    with pytest.raises(bcp.errors.RankFailedError):
        bcp.save(path, {"model": _model(1.0)}, deadline_s=30)


def test_first_save_killed_is_no_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(_die_first, path, expect_death={0: signal.SIGKILL})
    with pytest.raises(CheckpointError, match="none was committed"):
        bcp.open(path)


def _raise_in(rank: int, world_size: int, path: str, point: str, victim: int) -> list[str]:
    def fail(name: str, event: str) -> None:
        if rank == victim and name == point and event in ("enter", "point"):
            raise OSError(f"injected at {name}")

    stop = trace.observe(fail)
    try:
        state = {"model": _model(2.0), "extra_state": {"value": 2.0}}
        bcp.save(path, state, step=2, layout=_layout(point), deadline_s=30)
        said = "saved"
    except bcp.errors.BytecheckpointError as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        stop()
    before = sorted(os.listdir(path))
    bcp.save(path, {"model": _model(3.0), "extra_state": {"value": 3.0}}, step=3, deadline_s=30)
    return [said, *before]


@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in AFTER_COMMIT])
def test_a_failing_rank_fails_all_and_leaves_nothing(pool: RankPool, tmp_path: Path, point: str, victim: int) -> None:
    if victim != 0 and point.startswith("save.commit."):
        pytest.skip("only rank 0 puts the manifest")
    path = str(tmp_path / "checkpoint")
    pool.run(_save, path, 1.0)
    attempts = set(os.listdir(path))
    results = pool.run(_raise_in, path, point, victim)
    causes = {result[0] for result in results}
    if (point, victim) == ("save.commit", WORLD - 1) and "saved" in causes:
        # Rank 0 had put the manifest before it could hear of the failure: then the new checkpoint stands, alone.
        assert results[0][0] == "saved"
        assert len(results[0][1:]) == len(attempts)
    else:
        assert len(causes) == 1, causes
        assert f"rank {victim}" in causes.pop()
        assert "injected at" in results[0][0]
        assert set(results[0][1:]) == attempts, "the failed attempt left something"
    assert _check_whole(path) == 3.0
    assert torch.is_tensor(bcp.open(path)["model.weight"][0])
