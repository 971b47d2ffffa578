"""vLLM's server of a tiny model, in another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_pushes import ENVIRONMENT, PROMPTS, made, vllm_python

from bytecheckpoint.testing import time_limit


def ask_server(url: str, path: str, document: Any = None, headers: dict[str, str] | None = None) -> Any:
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=time_limit(120)) as answer:
        body = answer.read()
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body


def tokens_of(url: str, model: str = "policy", replica: int | None = None) -> list[list[int]]:
    """Greedy tokens from ``PROMPTS``; of one data-parallel replica, if it is given."""
    headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    options = {"model": model, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    requests = [{**options, "detokenize": False, "prompt": list(prompt)} for prompt in PROMPTS]
    answers = [ask_server(url, "/v1/completions", request, headers) for request in requests]
    return [answer["choices"][0]["token_ids"] for answer in answers]


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """The model of seed 0, with the worker extension."""
    made("llama", 0).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--enforce-eager", "--skip-tokenizer-init"]
    command += ["--distributed-executor-backend", "mp", "--worker-extension-cls", "vllm_fault.FaultyWorkers"]
    command += arguments
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    log = folder / "server.log"
    with log.open("w") as opened:
        process = vllm_python().start(command, env=environment, stdout=opened, stderr=opened, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + time_limit(200)
        while True:
            with contextlib.suppress(OSError):
                ask_server(url, "/health")
                break
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < end, log.read_text()[-5000:]
            time.sleep(0.5)
        ask_server(url, "/collective_rpc", {"method": "bcp_test_make_room"})
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test may have killed it
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(time_limit(10))
        except subprocess.TimeoutExpired:  # vLLM waits for replies that never come
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
