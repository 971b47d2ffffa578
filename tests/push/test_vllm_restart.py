"""An engine that restarts has the newest version: of a job's checkpoints, or of another engine. Needs vLLM."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_pushes import made, reference_tokens
from vllm_server import serving, tokens_of

import bytecheckpoint as bcp
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.engines.base import ask

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]

_ABSENT = "http://127.0.0.1:9"


def _options(root: Path, *peers: str) -> list[str]:
    extra = {"root": str(root), "peers": list(peers)}
    return ["--load-format", "bcp", "--model-loader-extra-config", json.dumps(extra)]


def _kill(url: str) -> None:
    pid = ask(HttpEngine(url), "state", {}, time_limit(60))[0]["pid"]
    os.killpg(os.getpgid(pid), signal.SIGKILL)


def test_from_a_root_and_from_a_peer(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    root = tmp_path / "runs"
    for step in (1, 2):
        bcp.save(root / f"step-{step}", {"model": made("llama", step)}, step=step)
    with ExitStack() as stack:
        options = _options(root, _ABSENT)
        starts = [serving(tmp_path / name, *options) for name in ("first", "second")]
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(stack.enter_context, starts)
        assert tokens_of(first) == tokens_of(second) == reference_tokens(made("llama", 2))
        with Pusher([HttpEngine(first), HttpEngine(second)], deadline_s=time_limit(60)) as pusher:
            pusher.push(made("llama", 3), version=3)
        _kill(first)
        two_workers = ["--tensor-parallel-size", "2", *_options(root, first, second)]
        again = stack.enter_context(serving(tmp_path / "first", *two_workers))
        assert tokens_of(again) == reference_tokens(made("llama", 3))
        with Pusher(HttpEngine(again), deadline_s=time_limit(60)) as pusher:
            assert [worker["version"] for worker in pusher.state()[0]] == [3, 3]
            pusher.push(made("llama", 4), version=4)
            assert tokens_of(again) == reference_tokens(made("llama", 4))
            assert pusher.rollback() == 3
            assert tokens_of(again) == reference_tokens(made("llama", 3))
