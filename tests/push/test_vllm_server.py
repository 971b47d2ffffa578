"""Pushes into vLLM's server over HTTP and its weight transfer, from a checkpoint and from FSDP-2. Needs vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from click.testing import CliRunner
from torch import nn
from torch.distributed.fsdp import fully_shard
from vllm_loras import CONFIG, lora, merge_descriptions, store
from vllm_pushes import ENVIRONMENT, PROMPTS, made, reference_tokens

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.inference.push import (
    AdapterEngine,
    HttpEngine,
    NativeEngine,
    Pusher,
    PushReport,
    adapter_state,
)
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_TP = 2


def _ask(url: str, path: str, document: Any = None) -> Any:
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=time_limit(120)) as answer:
        body = answer.read()
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body


def _tokens(url: str, model: str = "policy") -> list[list[int]]:
    options = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = [_ask(url, "/v1/completions", {**options, "detokenize": False, "prompt": list(p)}) for p in PROMPTS]
    return [answer["choices"][0]["token_ids"] for answer in answers]


@contextlib.contextmanager
def _serving(folder: Path, *arguments: str) -> Iterator[str]:
    """The model of seed 0, with the worker extension and the transfer backend."""
    made("llama", 0).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--enforce-eager", "--skip-tokenizer-init"]
    command += ["--distributed-executor-backend", "mp", "--worker-extension-cls", "vllm_fault.FaultyWorkers"]
    command += ["--weight-transfer-config", json.dumps({"backend": "bcp"}), *arguments]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    log = folder / "server.log"
    with log.open("w") as opened:
        process = subprocess.Popen(command, env=environment, stdout=opened, stderr=opened, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + time_limit(200)
        while True:
            with contextlib.suppress(OSError):
                _ask(url, "/health")
                break
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < end, log.read_text()[-5000:]
            time.sleep(0.5)
        _ask(url, "/collective_rpc", {"method": "bcp_test_make_room"})
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(time_limit(60))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of two workers, and with an adapter."""
    folder = tmp_path_factory.mktemp("server")
    lora_options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"started={store(folder, 8)}"]
    with _serving(folder, "--tensor-parallel-size", str(_TP), *lora_options) as url:
        yield url


def _push_sharded(rank: int, world_size: int, url: str, seeds: list[int]) -> list[tuple[PushReport, Any]]:
    found = []
    with Pusher(HttpEngine(url), deadline_s=time_limit(120)) as pusher:
        for seed in seeds:
            report = pusher.push(fully_shard(made("llama", seed)), version=seed)
            found.append((report, _tokens(url) if rank == 0 else None))
    return found


def test_from_two_ranks_that_hold_shards(server: str) -> None:
    assert _tokens(server) == reference_tokens(made("llama", 0))
    with RankPool(2) as pool:
        found = pool.run(_push_sharded, server, [1, 2, 3], timeout_s=200)[0]
    assert [tokens for _, tokens in found] == [reference_tokens(made("llama", seed)) for seed in (1, 2, 3)]
    for report, _ in found:
        assert all(worker.requested <= 0.55 * report.engine_bytes for worker in report.workers)
        assert all(nbytes > 0 for nbytes in report.written)


def test_the_command_and_the_version(server: str, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": made("llama", 4)}, step=4)
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", server])
    assert done.exit_code == 0, done.output
    assert _tokens(server) == reference_tokens(made("llama", 4))
    assert _ask(server, "/weight_info")["weight_version"] == "4"


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_by_its_own_weight_transfer(server: str, pause: Any) -> None:
    seed = {"keep": 5, "abort": 6}[pause]
    with Pusher(NativeEngine(HttpEngine(server, pause=pause)), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", seed), version=seed)
        assert _tokens(server) == reference_tokens(made("llama", seed))
        assert _ask(server, "/weight_info")["weight_version"] == str(seed)
        assert _ask(server, "/is_paused") == {"is_paused": False}


def _digests(url: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = _ask(url, "/collective_rpc", {"method": "bcp_test_digest"})["results"]
    return found


def test_joins_of_other_layouts_while_an_engine_goes_on(server: str, tmp_path: Path) -> None:
    """The server, of two workers, gives to an engine of two pipeline stages and other weights, and gets others back."""
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 7), version=7)
    given = reference_tokens(made("llama", 7))
    with _serving(tmp_path / "hf", "--pipeline-parallel-size", "2") as stages, Pusher(HttpEngine(stages)) as pusher:
        started = _digests(stages)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(pusher.push, HttpEngine(server))
            while not joining.done():
                assert _tokens(server) == given
            report = joining.result()
        assert report.version == 7
        assert sum(report.written) == sum(worker.sent for worker in report.workers)
        assert len(report.written) == _TP
        assert min(report.written) > 0
        assert _tokens(stages) == given
        joined = _digests(stages)
        pusher.push(made("llama", 8), version=8)
        assert _tokens(stages) == reference_tokens(made("llama", 8))
        pushed = _digests(stages)
        for one, other in ((started, joined), (joined, pushed)):
            assert all(before != after for before, after in zip(one, other, strict=True))
        # As if it had been pushed to; over vLLM's weight transfer this time.
        with Pusher(NativeEngine(HttpEngine(stages)), deadline_s=time_limit(120)) as native:
            native.push(made("llama", 7), version=7)
        assert _digests(stages) == joined
        assert _tokens(server) == given
        pusher.push(made("llama", 8), version=8)
        with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as back:
            assert back.push(HttpEngine(stages)).version == 8
        assert _tokens(stages) == reference_tokens(made("llama", 8))
    assert _tokens(server) == reference_tokens(made("llama", 8))


def test_an_engine_gives_by_its_own_weight_transfer(server: str) -> None:
    """To itself, in chunks of another size, so that all is sent."""
    with Pusher(NativeEngine(HttpEngine(server)), deadline_s=time_limit(120), chunk_bytes=1 << 14) as pusher:
        pusher.push(made("llama", 9), version=9)
    holder = NativeEngine(HttpEngine(server))
    with Pusher(NativeEngine(HttpEngine(server)), deadline_s=time_limit(120), chunk_bytes=1 << 15) as pusher:
        report = pusher.push(holder, version="nine")
    holder.close()
    assert [worker.sent for worker in report.workers] == [worker.requested for worker in report.workers]
    assert _tokens(server) == reference_tokens(made("llama", 9))
    assert _ask(server, "/weight_info")["weight_version"] == "nine"


class _Trainee(nn.Module):
    """The factors of an adapter, under the names of a PEFT model that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, tensor in lora(seed).items():
            *parents, leaf = name.replace(".weight", ".default.weight").split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in dict(place.named_children()):
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.register_parameter(leaf, nn.Parameter(tensor))


def _push_adapter(rank: int, world_size: int, url: str, name: str, seed: int, native: bool) -> PushReport:
    engine = NativeEngine(HttpEngine(url)) if native else HttpEngine(url)
    with Pusher(AdapterEngine(engine, name, CONFIG) if rank == 0 else None, deadline_s=time_limit(120)) as pusher:
        return pusher.push({"model": adapter_state(fully_shard(_Trainee(seed)))}, version=seed)


def test_adapters(server: str) -> None:
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher, RankPool(2) as pool:
        pusher.push(made("llama", 7), version=7)
        assert _tokens(server, "started") == reference_tokens(merge_descriptions(7, 8))
        report = pool.run(_push_adapter, server, "started", 9, False)[0]
        assert _tokens(server, "started") == reference_tokens(merge_descriptions(7, 9))
        assert [worker.sent for worker in report.workers] == [report.engine_bytes] * 2
        # An unknown adapter name is registered once; vLLM reads no file.
        pool.run(_push_adapter, server, "fresh", 10, True)
        _ask(server, "/v1/load_lora_adapter", {"lora_name": "fresh", "lora_path": "pushed"})
        assert _tokens(server, "fresh") == reference_tokens(merge_descriptions(7, 10))
        pool.run(_push_adapter, server, "fresh", 11, True)
        assert _tokens(server, "fresh") == reference_tokens(merge_descriptions(7, 11))
        assert _tokens(server) == reference_tokens(made("llama", 7))
        assert _ask(server, "/weight_info")["weight_version"] == "7"
        pusher.push(made("llama", 12), version=12)
    for name, seed in (("started", 9), ("fresh", 11)):
        assert _tokens(server, name) == reference_tokens(merge_descriptions(12, seed))
