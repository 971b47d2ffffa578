"""Values that are not finite never reach an engine, unless the caller allows them; then they leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyEngine, ToyTrainee, digest_of, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, MismatchError, StateError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.writing import check_finite
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(5, of=__name__)

STREAMED = {"memory_bytes": 40_000, "chunk_bytes": 4000}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2, "bfloat16") as started:
        yield started


def _trainee(version: int, value: float = 0.0) -> Any:
    model = ToyTrainee(version)
    if value:
        with torch.no_grad():
            model.out.weight[-1, -1] = value  # type: ignore[union-attr]
    return model


def _push(rank: int, world_size: int, url: str, value: float, options: dict[str, Any]) -> str:
    model = _trainee(2, value)
    if world_size > 1:
        fully_shard(model)
    with Pusher(HttpEngine(url), deadline_s=time_limit(30), **options) as pusher:
        try:
            pusher.push(model, version=2)
        except BytecheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["arenas", "streamed"])
def test_nothing_changes(engine: ToyEngine, options: dict[str, Any]) -> None:
    _push_checked(engine, 1)
    with RankPool(2) as pool:
        before = len(engine.look()["log"])
        for value in (torch.nan, -torch.inf):
            errors = pool.run(_push, engine.url, value, options)
            assert errors[0].splitlines()[0] == errors[1].splitlines()[0]
            assert errors[1].startswith("StateError: out.weight [")
            assert "1 of " in errors[1]
            assert "check_finite=False" in errors[1]
    assert "/pause" not in engine.look()["log"][before:]
    assert list(engine.look()["digests"]) == expected_digests(1, 2, torch.bfloat16)


def test_a_cast_that_overflows(engine: ToyEngine, tmp_path: Path) -> None:
    _push_checked(engine, 1)
    assert "StateError: out.weight" in _push(0, 1, engine.url, 3.4e38, {})  # finite in float32, infinite in bfloat16
    bcp.save(tmp_path / "c", {"model": _trainee(2, torch.nan)})
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(StateError, match="are NaN or infinite"):
            pusher.push(bcp.open(tmp_path / "c"))
        assert list(engine.look()["digests"]) == expected_digests(1, 2, torch.bfloat16)
        allowed = _trainee(2, torch.nan)
        pusher.push(allowed, version=2, check_finite=False)
        assert list(engine.look()["digests"]) == [digest_of(allowed, 2, rank, torch.bfloat16) for rank in range(2)]
        assert set(engine.look()["cleared"]) == {0}
        for version in (3, 4):
            pusher.push(ToyTrainee(version), version=version)
            assert set(engine.look()["cleared"]) == {1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_that_overflows_before_a_stream(dtype: str) -> None:
    """Rather than on the way, after which the engine would stay paused with a part of the weights."""
    value = 2 * torch.finfo(torch.float16).max if dtype == "float16" else 3.4e38  # finite in float32
    with toy_engine(2, dtype) as engine, RankPool(2) as pool:
        _push_checked(engine, 1)
        errors = pool.run(_push, engine.url, value, STREAMED)
        assert errors[1].startswith("StateError: out.weight [")
        assert not engine.paused
        assert list(engine.look()["digests"]) == expected_digests(1, 2, getattr(torch, dtype))


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["arenas", "streamed"])
def test_a_join(engine: ToyEngine, options: dict[str, Any]) -> None:
    """The holder may have a version that was pushed without the check."""
    with toy_engine(1, "bfloat16") as joining:
        _push_checked(joining, 1)
        spoiled = _trainee(2, torch.nan)
        with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
            pusher.push(spoiled, version=2, check_finite=False)
        with Pusher(HttpEngine(joining.url), deadline_s=time_limit(30), **options) as pusher:
            with pytest.raises(StateError, match="NaN or infinite"):
                pusher.push(HttpEngine(engine.url))
            assert list(joining.look()["digests"]) == expected_digests(1, 1, torch.bfloat16)
            assert not joining.paused
            pusher.push(HttpEngine(engine.url), check_finite=False)
            assert list(joining.look()["digests"]) == [digest_of(spoiled, 1, 0, torch.bfloat16)]
            pusher.push(ToyTrainee(3), version=3)
            assert set(joining.look()["cleared"]) == {1}  # the NaN may be in its caches


def _push_checked(engine: ToyEngine, version: int) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(version), version=version)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_dtype(dtype: torch.dtype) -> None:
    box = Box.whole((300,))
    finite = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)  # whose sum may overflow
    check_finite([("x", box, finite)])
    check_finite([("x", box, (-finite.double()).to(dtype))])
    for value in (torch.nan, torch.inf, -torch.inf):
        tensor = torch.zeros(300)
        tensor[123] = value
        spoiled = tensor.to(dtype)
        if not spoiled.float().isfinite().all():  # e4m3fn has no infinity
            with pytest.raises(StateError, match="1 of 300 values"):
                check_finite([("x", box, finite), ("y", box, spoiled)])
    check_finite([("x", box, torch.full((300,), torch.iinfo(torch.int64).max))])
    check_finite([("x", Box.whole((0,)), torch.empty(0, dtype=dtype))])


def test_integers_for_a_parameter_of_floats(engine: ToyEngine) -> None:
    _push_checked(engine, 1)
    state = dict(ToyTrainee(2).state_dict()) | {"norm": torch.ones(64, dtype=torch.int64)}
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(MismatchError, match="norm: it is int64, and the engine's parameter is bfloat16"):
            pusher.push({"model": state})
    assert list(engine.look()["digests"]) == expected_digests(1, 2, torch.bfloat16)
