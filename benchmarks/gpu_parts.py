"""What ``benchmarks.gpu`` measures, part by part. Each part runs in a separate process, one round after another.

The state is a stack of linear layers with AdamW: three tensors of float32 for each parameter.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.gpu import Settings

__all__ = ["COPY_OF_WEIGHTS", "serve"]

COPY_OF_WEIGHTS = "one copy of the weights"
"""The floor of pushes, measured by the part "push"."""

_LAYER = 1024
_BUCKET_BYTES = 64 << 20
_PACKAGE = "checkpoint-engine's function for workers, with a sender written here"
_LOOP = "a loop like checkpoint-engine's, in one process"
_PUSH_ROUNDS = 3
_SMALL_ROUNDS = 4

Seconds = dict[str, list[float]]


def synchronize(device: torch.device) -> None:
    """Wait for the device's kernels and copies."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Training:
    """Linear layers of about ``nbytes`` together with the state of their optimizer, after one step."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        width = min(_LAYER * 4, max(16, int((nbytes / 36) ** 0.5)))
        count = max(1, nbytes // (12 * width * width))
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=False, fused=False)
        self._batch = torch.ones(8, width, device=device)
        self.step()

    def step(self) -> float:
        """Train one step; return its seconds."""
        self.sync()
        begin = time.perf_counter()
        self.model(self._batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return time.perf_counter() - begin

    def sync(self) -> None:
        synchronize(self.device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state but the optimizer's steps, by name."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        for index, parameter in enumerate(self.model.parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{index}.{name}"] = self.optimizer.state[parameter][name]
        return found

    def forget(self) -> None:
        """Overwrite the state, so that a load must restore it."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def digest(self) -> list[float]:
        return [float(tensor.double().sum()) for tensor in self.tensors().values()]


class Timer:
    """Collects seconds by name."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: Seconds = {}
        self._device = device

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        synchronize(self._device)
        begin = time.perf_counter()
        yield
        synchronize(self._device)
        self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)


def floors(training: Training, timer: Timer, folder: str) -> None:
    """Measure the floors once."""
    from benchmarks.floors import Floors

    tensors = list(training.tensors().values())
    is_cuda = training.device.type == "cuda"
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    there = [torch.empty_like(tensor) for tensor in tensors]
    for warm in (True, False):
        scratch = Timer(training.device) if warm else timer
        for name, targets, sources in (
            ("device to pinned memory", host, tensors),
            ("pinned memory to device", there, host),
            ("device to device", there, tensors),
        ):
            with scratch.time(name):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
    del host, there
    disk = Floors(sum(tensor.nbytes for tensor in tensors))
    try:
        measured = disk.measure(os.path.join(folder, "floors"))
    finally:
        disk.close()
    for name in ("direct_write", "direct_read"):
        if (seconds := measured[name] or measured[name.replace("direct", "buffered")]) is not None:
            timer.add(name.replace("_", " "), seconds)


def library(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with this library once; the load must restore the state."""
    import bytecheckpoint as bcp
    from benchmarks.page_cache import evict

    paths = [os.path.join(folder, name) for name in ("asynchronous", "gated", "synchronous")]
    with timer.time("bytecheckpoint: stall, asynchronous"):
        handle = bcp.save(paths[0], training.state, async_save=True)
    handle.result()
    usual = training.step()
    training.sync()
    begin = time.perf_counter()
    handle = bcp.save(paths[1], training.state, async_save=True, options=bcp.SaveOptions(gate=True))
    stall = time.perf_counter() - begin
    timer.add("bytecheckpoint: stall, gated", stall + max(0.0, training.step() - usual))
    handle.result()
    expected = training.digest()
    with timer.time("bytecheckpoint: save, durable"):
        bcp.save(paths[2], training.state)
    training.forget()
    for path in Path(paths[2]).rglob("*.safetensors"):
        evict(str(path))
    with timer.time("bytecheckpoint: load, cold"):
        bcp.load(paths[2], training.state)
    if training.digest() != expected:
        raise AssertionError("the load did not restore the state")


def dcp(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with ``torch.distributed.checkpoint`` once, with the staging buffers that it reuses."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from benchmarks.page_cache import evict, sync_tree

    path = os.path.join(folder, "dcp")
    state = training.tensors()
    with timer.time("torch DCP: stall, asynchronous"):
        stager = _stager(training.device.type == "cuda")
        pending: Any = async_save(state, checkpoint_id=path + "-async", async_stager=stager, no_dist=True)
    getattr(pending, "upload_completion", pending).result()
    with timer.time("torch DCP: save, durable"):
        save(state, checkpoint_id=path, no_dist=True)
        sync_tree(path)
    for one in Path(path).rglob("*"):
        evict(str(one))
    with timer.time("torch DCP: load, cold"):
        load(state, checkpoint_id=path, no_dist=True)


@functools.cache
def _stager(is_cuda: bool) -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager: Any = DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_cuda,
        )
    )
    # torch 2.11 releases the buffers after each use, and cannot use the stager again.
    stager._state_dict_stager.close = lambda: None
    return stager


def safetensors(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with safetensors once; it has no asynchronous save."""
    from safetensors.torch import load_file, save_file

    from benchmarks.page_cache import evict, sync_tree

    path = os.path.join(folder, "state.safetensors")
    with timer.time("safetensors: save, durable"):
        save_file(training.tensors(), path)
        sync_tree(folder)
    evict(path)
    with timer.time("safetensors: load, cold"):
        loaded = load_file(path, device=str(training.device))
        for name, tensor in training.tensors().items():
            tensor.copy_(loaded[name])


def checkpoint_engine(training: Training, timer: Timer, folder: str) -> None:
    """Update weights as checkpoint-engine does: from pinned memory into two buckets in turn, from there to the weights.

    Where the package is installed, another process loads them with the package's function for workers; the sender is
    written here, because the package's own one needs a cluster. Elsewhere, a loop in this process does both, without
    the exchange of handles.
    """
    if importlib.util.find_spec("checkpoint_engine") and importlib.util.find_spec("zmq"):
        name, (update, check) = f"{_PACKAGE}: push", _package(training)
    else:
        name, (update, check) = f"{_LOOP}: push", _loop(training)
    with timer.time(name):
        update()
    check()


@functools.cache
def _loop(training: Training) -> tuple[Callable[[], None], Callable[[], None]]:
    weights, pinned = _pinned(training)
    size = max(_BUCKET_BYTES, max(weight.nbytes for weight in weights))
    buckets = [torch.empty(size, dtype=torch.uint8, device=training.device) for _ in range(2)]
    is_cuda = training.device.type == "cuda"
    streams = [torch.cuda.Stream(training.device) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]

    def update() -> None:
        for index, (source, weight) in enumerate(zip(pinned, weights, strict=True)):
            bucket = buckets[index % 2][: weight.nbytes].view(weight.dtype).view(weight.shape)
            if is_cuda:
                with torch.cuda.stream(streams[index % 2]):
                    bucket.copy_(source, non_blocking=True)
                    weight.copy_(bucket, non_blocking=True)
            else:
                weight.copy_(bucket.copy_(source))

    def check() -> None:
        if not all(torch.equal(weight.cpu(), source) for weight, source in zip(weights, pinned, strict=True)):
            raise AssertionError("the weights are not what was copied")

    return update, check


def _pinned(training: Training) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights, and copies of them in pinned memory."""
    weights = [parameter.detach() for parameter in training.model.parameters()]
    is_cuda = training.device.type == "cuda"
    return weights, [torch.empty(one.shape, dtype=one.dtype, pin_memory=is_cuda).copy_(one) for one in weights]


@functools.cache
def _package(training: Training) -> tuple[Callable[[], None], Callable[[], None]]:
    import zmq

    weights, pinned = _pinned(training)
    sizes = [-(-one.nbytes // 256) * 256 for one in pinned]
    size = max(_BUCKET_BYTES, *sizes)
    buffer, make_handle = _shared_buffer(2 * size, training.device)
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    arguments = theirs, str(training.device), [(one.shape, one.dtype) for one in weights]
    processes.Process(target=_package_worker, args=arguments, daemon=True).start()
    theirs.close()
    context = zmq.Context()
    expected = [float(one.double().sum()) for one in pinned]

    def receive(socket: Any) -> None:
        if answer := socket.recv():
            raise RuntimeError(answer.decode())

    def update() -> None:
        socket = context.socket(zmq.REQ)
        for limit in (zmq.RCVTIMEO, zmq.SNDTIMEO):  # a worker that has died neither connects nor answers
            socket.setsockopt(limit, 60_000)
        name = f"ipc://@bcp-gpu-{os.urandom(8).hex()}"
        socket.bind(name)
        try:
            ours.send(name)
            socket.send_pyobj(make_handle())
            for number, run in enumerate(_runs(sizes, size)):
                half, rows, offset = number % 2 * size, [], 0
                for index in run:
                    source, place = pinned[index], half + offset
                    target = buffer[place : place + source.nbytes].view(source.dtype).view(source.shape)
                    target.copy_(source, non_blocking=True)
                    row = {"name": str(index), "dtype": source.dtype, "shape": source.shape, "offset": place}
                    rows.append(row)
                    offset += sizes[index]
                training.sync()
                receive(socket)  # the worker has read the other half
                socket.send_pyobj(rows)
            receive(socket)
            for _ in range(2):  # release the buffer; end
                socket.send_pyobj(None)
                receive(socket)
        finally:
            socket.close(0)

    def check() -> None:
        ours.send(None)
        if not all(math.isclose(sent, held, abs_tol=1e-6) for sent, held in zip(expected, ours.recv(), strict=True)):
            raise AssertionError("the worker does not have what was sent")

    return update, check


def _shared_buffer(nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Return memory that another process opens by a handle, and what makes handles."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer, lambda: reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    from bytecheckpoint.inference.push.transports.shared_memory import SharedArena

    arena = SharedArena(nbytes)
    path = f"/proc/{os.getpid()}/fd/{arena.descriptor}"
    rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
    return arena.memory, lambda: (rebuild, (path, True, arena.nbytes))


def _runs(sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Yield runs of tensors that fit into ``limit`` bytes together."""
    run: list[int] = []
    for index, size in enumerate(sizes):
        if run and sum(sizes[other] for other in run) + size > limit:
            yield run
            run = []
        run.append(index)
    yield run


class _Host:
    """Replaces checkpoint-engine's ``DeviceManager`` in a dry run: the package does not support CPUs."""

    def __init__(self) -> None:
        self.device_module = self

    def synchronize(self) -> None:
        """Do nothing."""

    ipc_collect = empty_cache = synchronize


def _package_worker(pipe: Connection, device: str, shapes: list[tuple[torch.Size, torch.dtype]]) -> None:
    """Load an update with the package's function from each address; answer None with the sums of the weights."""
    import zmq
    from checkpoint_engine import worker

    index = torch.device(device).index
    if device == "cpu":
        worker.DeviceManager = _Host
    else:
        torch.cuda.set_device(device)
    weights = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]

    def load(named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            weights[int(name)].copy_(tensor)

    context = zmq.Context()
    while True:
        try:
            address = pipe.recv()
        except EOFError:
            return
        if address is None:
            pipe.send([float(weight.double().sum()) for weight in weights])
        else:
            worker.update_weights_from_ipc(context, address, index, run=load)


def small_tensors(settings: Settings) -> Seconds:
    """Save and load 20,000 tensors of 4 to 64 KiB, as experts and adapters have them; fewer for a small state."""
    import bytecheckpoint as bcp
    from benchmarks.workloads import make

    device = torch.device(settings.device)
    specs = make("tiny-tensors", min(1.0, settings.nbytes / (700 << 20))).tensors
    tensors = [torch.randn(one.shape, device=device).to(getattr(torch, one.dtype)) for one in specs]
    state = {"model": {one.name: tensor for one, tensor in zip(specs, tensors, strict=True)}}
    expected = [tensor.clone() for tensor in tensors]
    host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=device.type == "cuda") for one in tensors]
    timer = Timer(device)
    for turn in range(min(_SMALL_ROUNDS, settings.rounds) + 1):
        if turn == 1:
            timer.seconds.clear()  # memory, pools and plans are new in the first round
        with tempfile.TemporaryDirectory(prefix="small-", dir=settings.folder) as work:
            paths = [os.path.join(work, name) for name in ("asynchronous", "gated", "durable")]
            with timer.time("small tensors, each to pinned memory"):
                _copy_each(host, tensors)
            with timer.time("small tensors, each from pinned memory"):
                _copy_each(tensors, host)
            with timer.time("bytecheckpoint: small tensors, stall"):
                handle = bcp.save(paths[0], state, async_save=True)
            handle.result()
            begin = time.perf_counter()  # the copy goes on
            handle = bcp.save(paths[1], state, async_save=True, options=bcp.SaveOptions(gate=True))
            timer.add("bytecheckpoint: small tensors, return of a gated save", time.perf_counter() - begin)
            handle.result()
            with timer.time("bytecheckpoint: durable save of small tensors"):
                bcp.save(paths[2], state)
            for tensor in tensors:
                tensor.zero_()
            with timer.time("bytecheckpoint: small tensors, load, warm"):
                bcp.load(paths[2], state)
        if not all(map(torch.equal, tensors, expected)):
            raise AssertionError("the load did not restore the tensors")
    return timer.seconds


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def push(settings: Settings) -> Seconds:
    """Push with this library into engines on the same device, and copy the same bytes once."""
    return _push(settings, is_ipc=False)


def push_by_cuda_ipc(settings: Settings) -> Seconds:
    """Push from device to device. Separate from ``push``, because a fault on the device ends a part."""
    return _push(settings, is_ipc=True)


def _push(settings: Settings, *, is_ipc: bool) -> Seconds:
    from benchmarks.push import COPY, CUDA_WAYS, STREAM, WAYS, measure

    nbytes, device = settings.nbytes // 3, torch.device(settings.device).type
    ways = [
        name
        for name, (_, options) in (CUDA_WAYS if device == "cuda" else WAYS).items()
        if is_ipc == ("cuda_ipc" in options)
    ]
    if not ways:
        return {}
    found: Seconds = measure(nbytes, min(_PUSH_ROUNDS, settings.rounds), 2, device, ways)["seconds"]
    floors = {COPY: COPY_OF_WEIGHTS, STREAM: "the weights through one TCP stream"}
    return {floors.get(name, f"bytecheckpoint: push, {name}"): seconds for name, seconds in found.items()}


def describe(settings: Settings) -> dict[str, Any]:
    """Describe the machine, but not which one it is."""
    device = torch.device(settings.device)
    found = {"torch": torch.__version__, "cores": os.cpu_count(), "cuda": torch.version.cuda or ""}
    if device.type != "cuda":
        return {**found, "device": "CPU only (a dry run)", "memory": 0}
    properties = torch.cuda.get_device_properties(device)
    return {**found, "device": properties.name, "memory": properties.total_memory}


PARTS: dict[str, Callable[[Settings], Any]] = {
    "describe": describe,
    "small_tensors": small_tensors,
    "push": push,
    "push_by_cuda_ipc": push_by_cuda_ipc,
}
"""The parts that run once."""

ROUNDS: dict[str, Callable[[Training, Timer, str], None]] = {
    "floors": floors,
    "library": library,
    "dcp": dcp,
    "safetensors": safetensors,
    "checkpoint_engine": checkpoint_engine,
}
"""The parts that run in rounds."""


def serve(pipe: Connection, name: str, settings: Settings, log: str) -> None:
    """Run a part each time that a message arrives, and answer with its result or its traceback. Never returns
    normally: this process is killed, with what it has started."""
    os.setsid()  # what a part starts is killed with it
    with open(log, "ab", buffering=0) as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    faulthandler.enable()  # shows the stacks of all threads when the part is aborted
    training: Training | None = None
    while True:
        pipe.recv()
        try:
            if name in PARTS:
                result = PARTS[name](settings)
            else:
                training = training or Training(settings.nbytes, torch.device(settings.device))
                result = _round(training, name, settings)
        except BaseException as error:  # noqa: BLE001 - the other parts are worth measuring
            pipe.send(("failed", "".join(traceback.format_exception(error))))
        else:
            pipe.send(("done", result))


def _round(training: Training, name: str, settings: Settings) -> dict[str, Any]:
    timer = Timer(training.device)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=settings.folder) as work:
        ROUNDS[name](training, timer, work)
    return {"bytes": sum(tensor.nbytes for tensor in training.tensors().values()), "seconds": timer.seconds}
