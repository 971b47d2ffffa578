"""Pushes into a vLLM server whose data-parallel replicas share one address. Its RPC returns the answers of the first
one. Needs vLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from join_probes import until
from vllm_pushes import made, reference_tokens
from vllm_server import ask_server, serving, tokens_of

from bytecheckpoint import telemetry
from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]

_REPLICAS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server"), "--data-parallel-size", str(_REPLICAS)) as url:
        yield url


def _check_serves(server: str, seed: int) -> None:
    expected = reference_tokens(made("llama", seed))
    assert [tokens_of(server, replica=replica) for replica in range(_REPLICAS)] == [expected] * _REPLICAS
    assert ask_server(server, "/is_paused") == {"is_paused": False}


def test_all_replicas_or_none(server: str) -> None:
    first = 1
    with Pusher(HttpEngine(server, pause="keep"), deadline_s=time_limit(120)) as pusher:
        report = pusher.push(made("llama", first), version=first)
        assert [worker.requested for worker in report.workers] == [report.engine_bytes] * _REPLICAS
        _check_serves(server, first)
        ask_server(server, "/collective_rpc", {"method": "bcp_test_fail", "args": [1]})  # in the second replica alone
        with pytest.raises(EngineError, match=r"(?s)worker 1 of .*the layer does not fit"):
            pusher.push(made("llama", first + 1), version=first + 1)
        _check_serves(server, first)
        pusher.push(made("llama", first + 1), version=first + 1)
        _check_serves(server, first + 1)
        assert ask_server(server, "/weight_info")["weight_version"] == str(first + 1)


def _die(rank: int, world_size: int, url: str) -> None:
    telemetry.observe(lambda name, event: os.kill(os.getpid(), signal.SIGKILL) if name == "push.apply.paused" else None)
    with Pusher(HttpEngine(url), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 6), version=6)


def test_a_sender_that_is_killed(server: str) -> None:
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher, RankPool(1) as pool:
        pusher.push(made("llama", 5), version=5)
        pool.run(_die, server, expect_death={0: signal.SIGKILL})
        until(lambda: not ask_server(server, "/is_paused")["is_paused"], "resumed")
    _check_serves(server, 5)
