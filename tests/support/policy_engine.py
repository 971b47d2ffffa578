"""A stand-in for a vLLM server, in this process: a model of transformers, the real receiver, and the endpoints that a
push and a completion need."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bytecheckpoint.inference.push.engine_model import EngineModel
from bytecheckpoint.inference.push.receiver import Receiver


class PolicyEngine(EngineModel):
    """An ``EngineModel`` that samples. It calls ``on_completion`` with its version before each completion."""

    quantized, blocks = False, None

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self.model = LlamaForCausalLM(config).eval()
        self.versions: list[str] = []
        self.on_completion: Callable[[str], None] = lambda version: None
        self._receiver, self._lock = Receiver(self), threading.Lock()
        self.is_paused = False
        self.url = ""

    def make(self) -> nn.Module:
        with torch.device("meta"):
            return LlamaForCausalLM(self._config)

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.run_loader(self.model, weights)

    def restore(self) -> bool:
        return False

    def clear_caches(self) -> None:
        """Does nothing: there are no caches."""

    def post(self, path: str, document: dict[str, Any]) -> Any:
        if path == "/collective_rpc":
            with self._lock:
                return {"results": [self._receiver.answer(document["args"][0])]}
        if path == "/v1/completions":
            self.on_completion(self.versions[-1])
            with self._lock:
                assert not self.is_paused
                return {"choices": [{"token_ids": self._sample(**document)}]}
        if path == "/update_weight_version":
            self.versions.append(document["new_version"])
        elif path.partition("?")[0] in ("/pause", "/resume"):
            self.is_paused = path.startswith("/pause")
        return {}

    @torch.no_grad()
    def _sample(self, prompt: list[int], max_tokens: int, temperature: float, seed: int, **_: Any) -> list[int]:
        generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
        for _ in range(max_tokens):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1] / temperature
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
            if tokens[-1] == self._config.eos_token_id:
                break
        return tokens[len(prompt) :]


@contextmanager
def policy_engine(config: LlamaConfig) -> Iterator[PolicyEngine]:
    """Serve until the end of the block."""
    engine = PolicyEngine(config)

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"is_paused": engine.is_paused})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(engine.post(self.path, json.loads(body) if body else {}))

        def _send(self, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Front)
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
