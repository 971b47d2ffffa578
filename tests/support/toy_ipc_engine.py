"""A stand-in for an inference engine that is set up for checkpoint-engine: several processes, each with checkpoint-
engine's own function for workers, a toy of a model, HTTP. Nothing of this library answers there.

checkpoint-engine does not support workers on CPUs; these use their handles unchanged. Importing this module gives
senders of this process buckets in shared memory for them.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq
from checkpoint_engine import worker as checkpoint_engine_worker
from forked_server import forked_server
from toy_engine import ToyEngine, ToyModel, ToyTrainee, _Front, start_workers

from bytecheckpoint.inference.push import checkpoint_engine
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena


class _HostBuckets(checkpoint_engine.Buckets):
    """For workers on CPUs: one shared memory for all of them."""

    def __init__(self, devices: Sequence[str], nbytes: int) -> None:
        self.nbytes, self._buffers, self._arena = nbytes, [], SharedArena(2 * nbytes)
        self._host, address = self._arena.memory, self._arena.address
        rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        self.handles = [(rebuild, (path, True, address.nbytes))] * len(devices)

    def close(self) -> None:
        self._host = torch.empty(0, dtype=torch.uint8)
        self._arena.close()


def _on_cpus(devices: Sequence[str]) -> bool:
    return all(device.startswith("cpu-") for device in devices)


_gpu_buckets, _gpus_of = checkpoint_engine.Buckets, checkpoint_engine.gpus_of


def _buckets(devices: Sequence[str], nbytes: int) -> checkpoint_engine.Buckets:
    return (_HostBuckets if _on_cpus(devices) else _gpu_buckets)(devices, nbytes)


checkpoint_engine.Buckets = _buckets  # type: ignore[assignment, misc]
checkpoint_engine.gpus_of = lambda devices: [] if _on_cpus(devices) else _gpus_of(devices)


class _Host:
    """For the ``DeviceManager`` of workers on CPUs."""

    def __init__(self) -> None:
        self.device_module = self

    def synchronize(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class _Worker:
    def __init__(self, tp: int, rank: int, dtype: torch.dtype, cuda: bool) -> None:
        self.index = rank if cuda else None
        self.device = f"GPU-{torch.cuda.get_device_properties(rank).uuid}" if cuda else f"cpu-{rank}"
        self.model = ToyModel(tp, rank, dtype).to(f"cuda:{rank}" if cuda else "cpu")
        self.model.load_weights(iter(ToyTrainee(0).state_dict().items()))
        self.context = zmq.Context()
        self.fault: tuple[str, int] | None = None
        self.buckets: list[list[str]] = []

    def update(self, handles: dict[str, str]) -> None:
        self.buckets = []
        checkpoint_engine_worker.update_weights_from_ipc(
            self.context, handles[self.device], self.index, run=self._load, post_hook=self._finish
        )

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._go_wrong(len(self.buckets))
        self.buckets.append([name for name, _ in weights])
        self.model.load_weights(iter(weights))

    def _finish(self) -> None:
        self._go_wrong(-1)

    def _go_wrong(self, place: int) -> None:
        if self.fault is None or self.fault[1] != place:
            return
        what, self.fault = self.fault[0], None
        if what == "raise":
            raise RuntimeError("the layer does not fit")
        os.kill(os.getpid(), getattr(signal, what))


def _serve(pipe: Connection, tp: int, rank: int, dtype: str, cuda: bool) -> None:
    if not cuda:
        checkpoint_engine_worker.DeviceManager = _Host
    worker = _Worker(tp, rank, getattr(torch, dtype), cuda)
    while True:
        try:
            kind, argument = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        if kind == "update":
            try:
                worker.update(argument)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
        elif kind == "look":
            digest = copy.deepcopy(worker.model).cpu().digest()
            answer = [digest, worker.buckets, len(os.listdir("/proc/self/fd")), _memories()]
        else:
            worker.fault = kind, argument
        pipe.send(answer)


def _memories() -> int:
    """How much of a sender's memory this process has mapped."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return sum("/memfd:bcp" in line for line in maps)


class _IpcFront(_Front):
    unknown: tuple[str, ...] = ()
    reads_all = True

    def do_POST(self) -> None:
        if self.path.partition("?")[0] in self.unknown:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(404, {"detail": "Not Found"})
            return
        super().do_POST()

    def _answer(self, document: dict[str, Any]) -> Any:
        if self.path == "/collective_rpc":
            assert document["method"] == "update_weights_from_ipc"
            return {"results": self._update(document["args"][0])}
        if self.path == "/look":
            names = ("digests", "buckets", "descriptors", "memories")
            seen = dict(zip(names, zip(*self._all("look", None), strict=True), strict=True))
            return {**seen, "pids": self.pids, "log": self.log}
        return super()._answer(document)

    def _update(self, handles: dict[str, str]) -> list[Any]:
        if self.reads_all:
            answers = self._all("update", handles)
        else:
            with self.lock:
                for pipe in self.pipes:
                    pipe.send(("update", handles))
                answers = []
                while len(answers) < len(self.pipes) and not any(answers):
                    answers.append(self.pipes[len(answers)].recv())
        failed = [answer for answer in answers if answer is not None]
        if failed:
            raise OSError(failed[0])
        return answers


def _serve_engine(
    announce: Callable[[int], None],
    tp: int,
    dtype: str,
    port: int,
    unknown: tuple[str, ...],
    cuda: bool,
    first_failure: bool,
) -> None:
    torch.set_num_threads(1)
    _Front.pipes, _Front.pids = start_workers(_serve, [(tp, rank, dtype, cuda) for rank in range(tp)])
    _Front.log = []
    _IpcFront.unknown, _IpcFront.reads_all = unknown, not first_failure
    server = ThreadingHTTPServer(("127.0.0.1", port), _IpcFront)
    announce(server.server_address[1])
    server.serve_forever()


@contextmanager
def toy_ipc_engine(
    tp: int,
    dtype: str = "float32",
    *,
    port: int = 0,
    unknown: tuple[str, ...] = (),
    cuda: bool = False,
    first_failure: bool = False,
) -> Iterator[ToyEngine]:
    """Its workers are on the devices "cpu-0" and so on, or on the first GPUs. It has not the ``unknown`` paths. With
    ``first_failure``, it reads no answer behind that of a worker that raised, as vLLM."""
    with forked_server(_serve_engine, tp, dtype, port, unknown, cuda, first_failure) as found:
        yield ToyEngine(f"http://127.0.0.1:{found}")
