"""A stand-in for an SGLang server, in a thread: the endpoints that a push uses, as strict as those of SGLang
0.5.23 (names and types of fields, order of requests), and two workers with a toy of a model.

Like SGLang's, the workers read files by safetensors, and a server whose loader raises has no model any more. SGLang
itself does not import without its kernels for GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from toy_engine import ToyEngine, ToyModel, ToyTrainee

TP = 2
FIELDS: dict[str, dict[str, Any]] = {
    "/pause_generation": {"mode": str},
    "/continue_generation": {"torch_empty_cache": bool},
    "/update_weight_version": {"new_version": str, "abort_all_requests": bool},
    "/update_weights_from_disk": {
        "model_path": str,
        "load_format": str,
        "abort_all_requests": bool,
        "weight_version": str,
        "is_async": bool,
        "torch_empty_cache": bool,
        "keep_pause": bool,
        "recapture_cuda_graph": bool,
        "token_step": int,
        "flush_cache": bool,
        "manifest": dict,
    },
}
"""The fields of the requests, of which only ``model_path`` and ``new_version`` are required."""


class _Server(ThreadingHTTPServer):
    def __init__(self, start: Path, token: str) -> None:
        self.models = [ToyModel(TP, rank, torch.float32) for rank in range(TP)]
        self.token, self.model_path, self.weight_version = token, str(start), "default"
        self.mode, self.log = "", list[str]()
        self.fault: dict[str, Any] = {}
        self.scheduler = threading.Lock()  # handles one request at a time, in the order of their arrival
        self.load(str(start))
        super().__init__(("127.0.0.1", 0), _Front)

    def load(self, folder: str) -> None:
        for model in self.models:
            with safetensors.safe_open(f"{folder}/model.safetensors", framework="pt") as file:
                model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            self.go_wrong("in load")

    def go_wrong(self, when: str) -> None:
        if self.fault.get("when") == when:
            what, pid = self.fault["what"], self.fault["pid"]
            self.fault = {}
            if what == "raise":
                raise RuntimeError("the layer does not fit")
            os.kill(pid, getattr(signal, what))


class _Front(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self._send(200, {"model_path": self.server.model_path, "weight_version": self.server.weight_version})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if self.path == "/look":
            kept = ("model_path", "weight_version", "mode", "log")
            seen = {name: getattr(self.server, name) for name in kept}
            self._send(200, {**seen, "digests": [model.digest() for model in self.server.models]})
            return
        if self.path == "/fault":
            self.server.fault = document
            self._send(200, {})
            return
        self.server.log.append(self.path)
        self.server.go_wrong(f"at {self.path}")
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send(401, {"error": "Unauthorized"})
        elif self.path not in FIELDS:
            self._send(404, {"detail": "Not Found"})
        elif any(type(value) is not FIELDS[self.path].get(name) for name, value in document.items()):
            self._send(422, {"detail": f"unknown fields or wrong types: {document}"})
        else:
            with self.server.scheduler:
                self._send(*getattr(self, self.path[1:])(**document))

    def pause_generation(self, mode: str = "abort") -> tuple[int, Any]:
        if mode not in ("abort", "retract", "in_place"):
            return 422, {"detail": f"not a mode: {mode}"}
        self.server.mode = mode
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, torch_empty_cache: bool = True) -> tuple[int, Any]:
        self.server.mode = ""
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> tuple[int, Any]:
        assert not abort_all_requests
        self.server.weight_version = new_version
        return 200, {"success": True, "message": f"Weight version updated to {new_version}", "new_version": new_version}

    def update_weights_from_disk(
        self, model_path: str, load_format: str = "auto", weight_version: str = "", flush_cache: bool = True
    ) -> tuple[int, Any]:
        server, message, code = self.server, "Succeeded to update model weights.", 200
        assert load_format in ("auto", "safetensors")
        try:
            server.load(model_path)
        except Exception as error:
            code, message = 400, f"Failed to update weights: {error}.\nRolling back to original weights."
        else:
            if flush_cache and server.mode == "in_place":
                code, message = 400, "Weights were updated, but the cache was not flushed because"
            server.model_path, server.weight_version = model_path, weight_version or server.weight_version
        return code, {"success": code == 200, "message": message, "num_paused_requests": 0}

    def _send(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SglangServer(ToyEngine):
    """A client of the stand-in, for tests."""

    def fail(self, what: str, when: str, pid: int = 0) -> None:
        """Raise, or send a signal to a process, once: "in load", after the first worker, or "at /path"."""
        self._post("/fault", {"what": what, "when": when, "pid": pid})

    @property
    def paused(self) -> bool:
        return bool(self.look()["mode"])


@contextmanager
def sglang_server(start: Path, token: str = "secret") -> Iterator[SglangServer]:
    """Serve version 0 of the toy from the folder ``start``, which is written. Requests need the ``token``."""
    start.mkdir()
    save_file({name: one.clone() for name, one in ToyTrainee(0).state_dict().items()}, start / "model.safetensors")
    server = _Server(start, token)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield SglangServer(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
