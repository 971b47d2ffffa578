"""Tensors that the engines lack are left out of a push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, MismatchError, UsageError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


def _trainee(version: int) -> nn.Module:
    model = ToyTrainee(version)
    model.value_head = nn.Linear(4, 1)
    return model


def _push(rank: int, world_size: int, url: str, version: int, exclude: tuple[str, ...]) -> str:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        try:
            pusher.push(fully_shard(_trainee(version)), version=version, exclude=exclude)
        except BytecheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_head_of_the_trained_model(engine: ToyEngine) -> None:
    with RankPool(2) as pool:
        assert "value_head" in pool.run(_push, engine.url, 1, ())[0]
        assert pool.run(_push, engine.url, 1, ("model.value_head.*",)) == ["", ""]
        assert engine.look()["digests"] == expected_digests(1, 2)
        for text in pool.run(_push, engine.url, 2, ("model.value_head.*", "model.critic.*")):
            assert text.startswith("MismatchError: exclude has patterns that match nothing; nothing was sent")
            assert "model.critic.*: it matches no full name" in text
            assert "value_head" not in text


@pytest.mark.parametrize("rename", [None, {"model.": "policy."}])
def test_of_a_checkpoint(engine: ToyEngine, tmp_path: Path, rename: Any) -> None:
    section = "model" if rename is None else "policy"
    bcp.save(tmp_path / "c", {"model": _trainee(3)}, step=3)
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        checkpoint = bcp.open(tmp_path / "c")
        pusher.push(checkpoint, section=section, rename=rename, exclude=[f"{section}.value_head.*"])
        with pytest.raises(MismatchError, match="match nothing"):
            pusher.push(checkpoint, exclude=["value_head.*"])
    assert engine.look()["digests"] == expected_digests(3, 2)


def test_what_an_engine_sends(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url)) as pusher, pytest.raises(UsageError, match="exclude= apply to tensors"):
        pusher.push(HttpEngine(engine.url), exclude=["a"])


@pytest.mark.parametrize("version", [10**20, -(10**20)])
def test_a_version_that_is_too_long(engine: ToyEngine, version: int) -> None:
    with Pusher(HttpEngine(engine.url)) as pusher:
        with pytest.raises(UsageError, match="version must fit into 64 bits"):
            pusher.push(ToyTrainee(1), version=version)
        pusher.push(ToyTrainee(1), version=str(version))
