"""Engines that change without a push. While they sleep, nothing accesses their memory, and nothing resumes them; when
they have reloaded their weights, they no longer serve what was pushed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import EngineError, StateError
from bytecheckpoint.inference.push import HttpEngine, Pusher, RpcEngine
from bytecheckpoint.testing import time_limit

_STREAMED = {"memory_bytes": 20_000, "chunk_bytes": 4096}


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


def _sleep(engine: ToyEngine, *tags: str) -> None:
    for worker in range(2):
        engine.fault(worker, "sleep", list(tags))


def _pauses(engine: ToyEngine) -> int:
    return engine.look()["log"].count("/pause")


@pytest.mark.parametrize("options", [{}, _STREAMED], ids=["arenas", "streamed"])
@pytest.mark.parametrize(
    ("tags", "message"),
    [(("weights", "kv_cache"), "memory of its weights is not mapped"), (("kv_cache",), r"sleeps \(kv_cache\)")],
)
def test_a_push(engine: ToyEngine, options: dict[str, Any], tags: tuple[str, ...], message: str) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **options) as pusher:
        for version in (5, 1):
            pusher.push(ToyTrainee(version), version=version)
        before = _pauses(engine)
        _sleep(engine, *tags)
        try:
            with pytest.raises(StateError, match="do not all hold" if options else "sleeps"):
                pusher.rollback()
            with pytest.raises(StateError, match=message):
                pusher.push(ToyTrainee(2), version=2)
            with pytest.raises(StateError, match="sleeps"):
                pusher.resume()
        finally:
            _sleep(engine)
        assert _pauses(engine) == before
        assert engine.look()["digests"] == expected_digests(1, 2)
        pusher.push(ToyTrainee(2), version=2)
        assert engine.look()["digests"] == expected_digests(2, 2)


def test_an_engine_that_its_owner_resumes_may_have_no_cache(engine: ToyEngine) -> None:
    """As of a ``vllm.LLM``, whose weights are woken up first, so that the memory of its cache is free meanwhile."""

    def call(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "collective_rpc":
            return engine._post("/collective_rpc", {"method": "bcp_push", "args": list(options["args"])})["results"]
        return True

    spoiled: Any = ToyTrainee(3)
    spoiled.norm.data[0] = torch.nan
    with Pusher(RpcEngine(call, name="an LLM"), deadline_s=time_limit(30)) as pusher:
        pusher.push(spoiled, version=3, check_finite=False)
        before = engine.look()["cleared"]
        _sleep(engine, "kv_cache")
        try:
            pusher.push(ToyTrainee(4), version=4)
        finally:
            _sleep(engine)
        assert engine.look()["cleared"] == before
        assert engine.look()["digests"] == expected_digests(4, 2)


@pytest.mark.parametrize("options", [{}, _STREAMED], ids=["double", "streamed"])
def test_an_engine_that_reloads(engine: ToyEngine, options: dict[str, Any]) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **options) as pusher:
        for version in (1, 2):
            pusher.push(ToyTrainee(version), version=version)
        for worker in range(2):
            engine.fault(worker, "reload")
        assert [one["version"] for one in pusher.state()[0]] == [None, None]
        with pytest.raises(StateError, match="do not all hold"):
            pusher.rollback()
        with toy_engine(1) as other, Pusher(HttpEngine(other.url), deadline_s=time_limit(30)) as joining:
            with pytest.raises(StateError, match="serves what it started with"):
                joining.push(HttpEngine(engine.url))
        assert engine.look()["digests"] == expected_digests(0, 2)
        pusher.push(ToyTrainee(2), version=2)  # its bytes are still there
        assert engine.look()["digests"] == expected_digests(2, 2)
        for version in (3, 4):
            pusher.push(ToyTrainee(version), version=version)
            assert engine.look()["digests"] == expected_digests(version, 2)


def test_an_engine_that_reloads_after_a_failure(engine: ToyEngine) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **_STREAMED) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        engine.fault(0, "fail", 1)
        with pytest.raises(EngineError, match="is left paused"):
            pusher.push(ToyTrainee(2), version=2)
        for worker in range(2):
            engine.fault(worker, "reload")
        assert pusher.resume() == [None]
        assert not engine.paused
        pusher.push(ToyTrainee(3), version=3)
        assert engine.look()["digests"] == expected_digests(3, 2)
