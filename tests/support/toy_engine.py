"""A stand-in for an inference engine: its own processes, the real receiver in each worker, a toy model, HTTP.

It fuses, splits and pads tensors like engines, and fails on request.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import select
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from forked_server import forked_server
from host_device import HostDevice, host_device
from torch import nn
from toy_adapters import ToyAdapters

from bytecheckpoint import telemetry
from bytecheckpoint.control.connections import send
from bytecheckpoint.inference.push import joins
from bytecheckpoint.inference.push.adapters import AdapterReceivers
from bytecheckpoint.inference.push.engine_model import EngineModel
from bytecheckpoint.inference.push.engines.base import split_target
from bytecheckpoint.inference.push.messages import decode
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.testing import time_limit

HIDDEN, VOCABULARY, EXPERTS = 64, 50, 2


class ToyTrainee(nn.Module):
    """The trained model. Its head is its embedding."""

    def __init__(self, version: int) -> None:
        super().__init__()
        torch.manual_seed(version)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        for name in ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=name != "out"))
        self.experts = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN))
        self.norm = nn.Parameter(torch.randn(HIDDEN))
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


class ToyModel(nn.Module):
    """One worker's part of the model, with a loader like those of engines."""

    def __init__(self, tp: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp, self.rank, self.part = tp, rank, HIDDEN // tp

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.embedding, self.head = parameter(64 // tp, HIDDEN), parameter(64 // tp, HIDDEN)
        self.qkv, self.qkv_bias = parameter(3 * self.part, HIDDEN), parameter(3 * self.part)
        self.out = parameter(HIDDEN, self.part)
        self.gate_up = parameter(EXPERTS, 2 * self.part, HIDDEN)
        self.norm, self.scale, self.turned = parameter(HIDDEN), parameter(1), parameter(HIDDEN, HIDDEN)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        begin, part = self.rank * self.part, self.part
        for name, tensor in weights:
            if name in ("embedding.weight", "head.weight"):
                rows = 64 // self.tp
                here = tensor[self.rank * rows : min((self.rank + 1) * rows, VOCABULARY)]
                target = getattr(self, name.split(".")[0])
                target.data[: here.shape[0]].copy_(here)
                target.data[here.shape[0] :].fill_(0)
                loaded.add(name.split(".")[0])
            elif name[:2] in ("q.", "k.", "v."):
                target = self.qkv if name.endswith("weight") else self.qkv_bias
                target.data.narrow(0, "qkv".index(name[0]) * part, part).copy_(tensor.narrow(0, begin, part))
                loaded.add("qkv" if name.endswith("weight") else "qkv_bias")
                if name == "v.weight":
                    self.turned.data.copy_(tensor.t())
                    loaded.add("turned")
            elif name == "out.weight":
                self.out.data.copy_(tensor.narrow(1, begin, part))
                loaded.add("out")
            elif name == "experts":
                for expert in range(EXPERTS):
                    gate, up = tensor[expert].chunk(2)
                    self.gate_up.data[expert, :part].copy_(gate[begin : begin + part])
                    self.gate_up.data[expert, part:].copy_(up[begin : begin + part])
                loaded.add("gate_up")
            elif name == "norm":
                self.norm.data.copy_(tensor)
                loaded.add("norm")
            elif name == "scale":
                self.scale.data.fill_(tensor.item())  # a loader that reads a value
                loaded.add("scale")
            else:
                raise ValueError(f"There is no module or parameter named {name!r}")
        return loaded

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.parameters():
            found.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def expected_digests(version: int, tp: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return the digests of workers that serve the weights of this version."""
    return [digest_of(ToyTrainee(version), tp, rank, dtype) for rank in range(tp)]


def digest_of(trainee: nn.Module, tp: int, rank: int, dtype: torch.dtype = torch.float32) -> str:
    model = ToyModel(tp, rank, dtype)
    model.load_weights(iter([(name, tensor.detach()) for name, tensor in trainee.state_dict().items()]))
    return model.digest()


class ToyWorker(EngineModel):
    """An ``EngineModel``, of which so many loads as there are ``failures`` break off, having changed the model. With a
    path in ``fails_after``, the next one takes all, and breaks off when this pipe has been written to."""

    def __init__(self, tp: int, rank: int, dtype: torch.dtype, blocks: tuple[int, int] | None = None) -> None:
        self.tp, self.rank, self.dtype, self.blocks = tp, rank, dtype, blocks
        self.quantized = blocks is not None
        self.model = self._made()
        self.model.load_weights(iter(ToyTrainee(0).state_dict().items()))
        self.rehearsals, self.failures, self.can_restore, self.fails_after = 0, 0, False, ""
        self.cleared = 0
        self.sleeps: list[str] = []
        self.is_reloaded = False
        self.serves_own = self.served_own = True

    def _made(self) -> ToyModel:
        if self.blocks is None:
            return ToyModel(self.tp, self.rank, self.dtype)
        from toy_blocks import BlockToyModel

        return BlockToyModel(self.tp, self.rank, self.dtype, self.blocks)

    def make(self) -> ToyModel:
        self.rehearsals += 1
        with torch.device("meta"):
            return self._made()

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)  # type: ignore[operator]

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self.sleeps
        self.served_own, self.serves_own, self.is_reloaded = self.serves_own, False, False
        if not self.failures:
            self.model.load_weights(weights)
            if self.fails_after:
                path, self.fails_after = self.fails_after, ""
                with open(path, "rb") as pipe:
                    pipe.read(1)
                raise RuntimeError("the layer does not fit")
            return
        self.failures -= 1
        self.model.load_weights((name, tensor) for name, tensor in weights if name < "n")
        raise RuntimeError("the layer does not fit")

    def restore(self) -> bool:
        if not self.can_restore or not self.served_own:
            return False
        self.model.load_weights(iter(ToyTrainee(0).state_dict().items()))
        self.serves_own = True
        return True

    def clear_caches(self) -> None:
        assert "kv_cache" not in self.sleeps
        self.cleared += 1

    def asleep(self) -> list[str]:
        return self.sleeps

    def reload(self) -> None:
        """As the engine's owner does, without a push."""
        self.model.load_weights(iter(ToyTrainee(0).state_dict().items()))
        self.is_reloaded = True

    def was_replaced(self) -> bool:
        return self.is_reloaded


class _Stall:
    """Until ``end``, what this process sends to engines that join waits, ``waiting`` times at once."""

    def __init__(self) -> None:
        self.waiting = 0
        self._gate = threading.Event()
        self._patch = mock.patch.object(joins, "send", self._wait)
        self._patch.start()

    def _wait(self, connection: socket.socket, *arguments: Any) -> None:
        self.waiting += 1
        end = select.poll()
        end.register(connection, select.POLLRDHUP)
        while not self._gate.wait(0.01) and not end.poll(0):
            pass
        send(connection, *arguments)

    def end(self) -> None:
        self._patch.stop()
        self.waiting = 0
        self._gate.set()


def _nothing() -> None: ...


def _signal_at(point: str, event: str, pid: int, number: int, name: str, now: str) -> None:
    """``pid`` is 0 for this worker, and 1 for the server."""
    if (name, now) == (point, event):
        with suppress(ProcessLookupError):
            os.kill({0: os.getpid(), 1: os.getppid()}.get(pid, pid), number)


def _worker(pipe: Connection, tp: int, rank: int, dtype: str, blocks: tuple[int, int] | None, device: str) -> None:
    gc.disable()  # memory must be released at once, without a garbage collection
    with ExitStack() as stack:
        if device == "host":
            stack.enter_context(host_device())
        worker = ToyWorker(tp, rank, getattr(torch, dtype), blocks)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            worker.model.to(device)
        _serve(pipe, worker)


def _serve(pipe: Connection, worker: ToyWorker) -> None:
    device = next(worker.model.parameters()).device
    receiver = Receiver(worker, device=device)
    adapters = ToyAdapters(dict.fromkeys(("q", "k", "v", "out"), HIDDEN), worker.dtype)
    receivers = AdapterReceivers(adapters)
    flips, own_signal, stops, unobserve = 0, None, False, _nothing
    stall: _Stall | None = None
    while True:
        try:
            kind, argument = pipe.recv()
        except EOFError:
            return
        if kind == "bcp_push":
            target, request = split_target(argument)
            meant = receiver if target is None else receivers.receiver(target)
            asked = decode(request)["kind"]
            if asked == "verify" and flips:
                flips -= 1
                meant._versions.next.memory[1000] ^= 1  # type: ignore[union-attr]
            if own_signal is not None and asked in own_signal[1]:
                (sent, _), own_signal = own_signal, None
                os.kill(os.getpid(), sent)
            answer = meant.answer(request, None if target is None else receiver)
            pipe.send(answer)
            if stops and asked == "prepare" and "endpoint" in decode(answer):
                stops = False
                os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "flip":
            flips += 1
            pipe.send(None)
        elif kind.startswith(("stop in ", "die in ")):
            asked = kind.split()[-1]
            sent = signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL
            own_signal = sent, ("apply", "stream") if asked == "apply" else (asked,)
            pipe.send(None)
        elif kind == "stop after prepare":
            stops = True
            pipe.send(None)
        elif kind == "damage":
            receiver._versions.served.memory[argument] ^= 1  # type: ignore[union-attr]
            pipe.send(None)
        elif kind == "stall":
            stall = _Stall()
            pipe.send(None)
        elif kind == "go on":
            if stall is not None:
                stall.end()
            pipe.send(None)
        elif kind == "signal at":
            unobserve()
            unobserve = telemetry.observe(functools.partial(_signal_at, *argument)) if argument else _nothing
            pipe.send(None)
        elif kind == "fail":
            worker.failures += argument
            pipe.send(None)
        elif kind == "fail after":
            worker.fails_after = argument
            pipe.send(None)
        elif kind == "fail adapter":
            adapters.failures += argument
            pipe.send(None)
        elif kind == "can_restore":
            worker.can_restore = True
            pipe.send(None)
        elif kind == "sleep":
            worker.sleeps = argument
            pipe.send(None)
        elif kind == "reload":
            worker.reload()
            pipe.send(None)
        elif kind in ("forget", "start version"):
            worker.start_version = argument
            receiver.close()
            receiver = Receiver(worker, device=device)
            pipe.send(None)
        else:
            descriptors = len(os.listdir("/proc/self/fd"))
            threads = len(os.listdir("/proc/self/task"))
            held = len(HostDevice.taken)
            waiting = 0 if stall is None else stall.waiting
            counts = worker.rehearsals, descriptors, threads, adapters.digests(), held, worker.cleared, waiting
            pipe.send([worker.model.digest(), *counts])


def _is_paused(log: Sequence[str]) -> bool:
    requests = [path for path in log if path in ("/pause", "/resume")]
    return requests[-1:] == ["/pause"]


class _Front(BaseHTTPRequestHandler):
    pipes: list[Connection]
    pids: list[int]
    is_dead = False
    busy = 0  # how many requests a proxy answers next
    token = ""
    drops_cache = True
    log: list[str]
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/is_paused":
            self._send(200, {"is_paused": _is_paused(self.log)})
        else:
            self._send(503 if _Front.is_dead else 200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_known = not _Front.token or self.headers.get("Authorization") == f"Bearer {_Front.token}"
        if not is_known and self.path not in ("/look", "/fault"):
            self._send(401, {"error": "Unauthorized"})
            return
        self.log.append(self.path.partition("?")[0])
        if _Front.busy and self.path not in ("/look", "/fault"):
            _Front.busy -= 1
            self._send(503, {"error": "no healthy upstream"})
            return
        try:
            answer = self._answer(json.loads(body) if body else {})
        except (EOFError, OSError) as error:
            _Front.is_dead = True
            self._send(500, {"error": f"Worker died: {error!r}"})
            return
        self._send(200, answer)

    def _answer(self, document: dict[str, Any]) -> Any:
        if self.path == "/collective_rpc":
            return {"results": self._all(document["method"], document["args"][0])}
        if self.path == "/look":
            seen = self._all("look", None)
            names = ("digests", "rehearsals", "descriptors", "threads", "adapters", "arenas", "cleared", "waiting")
            return {**dict(zip(names, zip(*seen, strict=True), strict=True)), "pids": self.pids, "log": self.log}
        if self.path.startswith("/reset_prefix_cache"):
            return {"success": _Front.drops_cache}
        if self.path == "/fault" and document["what"] == "keep cache":
            _Front.drops_cache = not document["argument"]
            return None
        if self.path == "/fault" and document["what"] == "busy":
            _Front.busy = document["argument"]
            return {}
        if self.path == "/fault":
            pipe = self.pipes[document["worker"]]
            with self.lock:
                pipe.send((document["what"], document.get("argument")))
                return pipe.recv()
        return {}

    def _all(self, kind: str, argument: Any) -> list[Any]:
        with self.lock:  # one request at a time, like engines
            for pipe in self.pipes:
                pipe.send((kind, argument))
            return [pipe.recv() for pipe in self.pipes]

    def _send(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _serve_engine(
    announce: Callable[[int], None],
    tp: int,
    dtype: str,
    blocks: tuple[int, int] | None,
    devices: Sequence[str],
    token: str,
) -> None:
    torch.set_num_threads(1)
    each = [(tp, rank, dtype, blocks, devices[rank] if devices else "") for rank in range(tp)]
    _Front.pipes, _Front.pids = start_workers(_worker, each)
    _Front.log, _Front.token = [], token
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Front)
    announce(server.server_address[1])
    server.serve_forever()


def start_workers(
    target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> tuple[list[Connection], list[int]]:
    """Fork a process for each of the arguments; the first argument of each is its end of a pipe."""
    context = multiprocessing.get_context("fork")
    pipes, pids = [], []
    for each in arguments:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *each), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        pids.append(process.pid)
    return pipes, pids  # type: ignore[return-value]


class ToyEngine:
    """A client of the stand-in, for tests."""

    def __init__(self, url: str) -> None:
        self.url = url

    def look(self) -> dict[str, Any]:
        seen: dict[str, Any] = self._post("/look", {})
        return seen

    def fault(self, worker: int, what: str, argument: Any = None) -> None:
        self._post("/fault", {"worker": worker, "what": what, "argument": argument})

    @property
    def paused(self) -> bool:
        return _is_paused(self.look()["log"])

    def pause(self) -> None:
        """As the engine's owner does."""
        self._post("/pause", {})

    def resume(self) -> None:
        self._post("/resume", {})

    def _post(self, path: str, document: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(document).encode(), method="POST")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=time_limit(60)
        ) as response:
            return json.loads(response.read())


@contextmanager
def toy_engine(
    tp: int,
    dtype: str = "float32",
    blocks: tuple[int, int] | None = None,
    devices: Sequence[str] = (),
    token: str = "",
) -> Iterator[ToyEngine]:
    """With ``blocks``, one that has its matrices in 8 bits with scales of such blocks. ``devices`` of its workers, in
    whose memory weights may arrive: ``cuda:N``, or "host" for the stand-in. Requests need the ``token``."""
    with forked_server(_serve_engine, tp, dtype, blocks, devices, token) as port:
        yield ToyEngine(f"http://127.0.0.1:{port}")
