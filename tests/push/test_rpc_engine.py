"""Engines behind a handle, and engines whose RPC returns the answers of the first replica only. The handle is not
vLLM's; with vLLM itself, see test_vllm_async, test_vllm_replicas and test_vllm_ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import DeadlineError, EngineError, UsageError
from bytecheckpoint.inference.push import LocalEngine, Pusher, RpcEngine
from bytecheckpoint.inference.push.engines import rpc
from bytecheckpoint.inference.push.engines.rpc import REPLICATED, post_answer
from bytecheckpoint.testing import time_limit


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[ToyEngine]]:
    with toy_engine(1) as first, toy_engine(1) as second:
        yield [first, second]


class _Handle:
    """Of an engine with these replicas; ``calls`` are those of other methods than the RPC."""

    def __init__(self, replicas: Sequence[ToyEngine]) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.drops_cache, self.is_paused = True, False
        self._replicas = replicas

    def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "collective_rpc":
            return self._answers(*options["args"])
        if method == "is_paused":
            return self.is_paused
        self.calls.append((method, arguments or options))
        return self.drops_cache

    def _answers(self, request: str, where: str | None = None) -> list[str]:
        if where is None and len(self._replicas) > 1:
            return [REPLICATED]
        found = [one._post("/collective_rpc", {"method": "bcp_push", "args": [request]}) for one in self._replicas]
        answers = [answer for one in found for answer in one["results"]]
        if where is None:
            return answers
        for number, answer in enumerate(answers):
            post_answer(where, number, len(answers), answer)
        return [""]


@pytest.mark.parametrize("count", [1, 2])
def test_every_replica_and_what_else_is_called(replicas: list[ToyEngine], count: int) -> None:
    handle = _Handle(replicas[:count])
    engine = RpcEngine(handle, name="actor")
    with Pusher(engine, deadline_s=time_limit(30)) as pusher:
        for version in (1, 2):
            report = pusher.push(ToyTrainee(version), version=version)
            assert [worker.engine for worker in report.workers] == ["actor"] * count
            for replica in replicas[:count]:
                assert list(replica.look()["digests"]) == expected_digests(version, 1, torch.float32)
    assert handle.calls[:2] == [("reset_prefix_cache", {}), ("update_weight_version", ("1",))]
    handle = _Handle(replicas[:count])
    with Pusher(RpcEngine(handle, name="actor", pause="keep"), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(3), version=3)
        names = [name for name, _ in handle.calls]
        assert names == ["pause_generation", "reset_prefix_cache", "update_weight_version", "resume_generation"]
        assert handle.calls[0][1] == {"mode": "keep"}
        handle.is_paused = True  # by its owner
        handle.calls.clear()
        pusher.push(ToyTrainee(4), version=4)
        assert [name for name, _ in handle.calls] == names[:-1]
        handle.is_paused = handle.drops_cache = False
        with pytest.raises(EngineError, match="actor did not drop its prefix cache"):
            pusher.push(ToyTrainee(5), version=5)


def test_an_interrupt_is_no_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives when the engine has answered, and the answer is being returned."""

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

    answered: Future[Any] = Interrupted()
    answered.set_result([])
    monkeypatch.setattr(rpc, "run_daemon", lambda call, name: answered)
    with pytest.raises(KeyboardInterrupt):
        RpcEngine(print, name="actor", pause="wait").pause(1.0)


def test_the_loop_of_an_engine_must_run() -> None:
    class Llm:
        async def collective_rpc(self) -> None: ...

    with pytest.raises(UsageError, match="pass loop="):
        LocalEngine(Llm())

    async def push() -> None:
        with Pusher(LocalEngine(Llm())) as pusher:
            pusher.push(ToyTrainee(1))

    with pytest.raises(UsageError, match=r"asyncio\.to_thread"):
        asyncio.run(push())


def test_requests_that_do_not_end() -> None:
    ended = threading.Event()
    engine = RpcEngine(lambda *_, **__: ended.wait(), name="the actor", pause="wait")
    try:
        with pytest.raises(DeadlineError, match=r"did not pause within .* its running requests have not ended"):
            engine.pause(0.05)
    finally:
        ended.set()
