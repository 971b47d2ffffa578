"""Time pushes into engines on the same host over every transport, next to one copy of the bytes and one TCP stream.

    python -m benchmarks.push [--mebibytes 512] [--rounds 5] [--json FILE]
    python -m benchmarks.push --cuda --workers 4 --mebibytes 16384 --json FILE

One sender pushes to engines of two processes with the real receiver (``push_engine``), which only copy layers into
parameters. All weights change before each push. Each round measures the floors and all transports in turn; the results
are medians. Host memory replaces the network between hosts, so the figures show the cost of a push without a network.

With ``--cuda``, weights are on GPUs on both sides (all workers on one GPU where there is only one): CUDA IPC next to
the transports through host memory and a copy on the device.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.push_engine import PipeEngine, trainee
from benchmarks.results import header
from bytecheckpoint.inference.push import Pusher, PushReport
from bytecheckpoint.inference.push.transports.cuda_ipc import synchronize

if TYPE_CHECKING:
    from benchmarks.tables import Grid

__all__ = ["COPY", "CUDA_WAYS", "JOIN", "NOTHING", "STREAM", "WAYS", "grid", "main", "measure"]

RING = 64 << 20

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "shared memory, two versions held": (1, {}),
    "shared memory, streamed": (1, {"memory_bytes": RING}),
    "TCP, two versions held": (1, {"tcp_only": True}),
    "TCP, streamed": (1, {"tcp_only": True, "memory_bytes": RING}),
    "a group (gloo), streamed": (1, {"group": "gloo", "memory_bytes": RING}),
    "two engines: TCP, streamed": (2, {"tcp_only": True, "memory_bytes": RING}),
    "two engines: a group (gloo), streamed": (2, {"group": "gloo", "memory_bytes": RING}),
}
"""Engines, and options of ``Pusher``; a fraction is one of a worker's weights."""

CUDA_WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "through host memory, two versions held": (1, {}),
    "through host memory, streamed": (1, {"memory_bytes": 4 * RING}),
    "CUDA IPC, streamed": (1, {"cuda_ipc": True}),
}

COPY, STREAM = "floor: one copy", "floor: one TCP stream"
NOTHING, JOIN = "nothing has changed", "from the first engine into the second, which joins"


def measure(
    nbytes: int, rounds: int, workers: int = 2, device: str = "cpu", only: Collection[str] = ()
) -> dict[str, Any]:
    """Seconds of every round by transport (only these, if given) and by floor, and the bytes that left the sender."""
    model = trainee(nbytes).to(device)
    offered = CUDA_WAYS if device == "cuda" else WAYS
    offered = {name: way for name, way in offered.items() if name in only or not only}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with ExitStack() as stack:
        layers, most = len(list(model.parameters())), max(count for count, _ in offered.values())
        engines = [PipeEngine(f"engine {n}", layers, workers, device) for n in range(most)]
        for engine in engines:
            stack.callback(engine.end)
        ways = {name: _way(engines, model, nbytes // workers, stack, *way) for name, way in offered.items()}
        seconds: dict[str, list[float]] = {}
        left: dict[str, int] = {}
        for number in range(rounds + 1):
            found = {COPY: _copy(model)}
            if device == "cpu":
                found[STREAM] = _stream(nbytes)
            for name, push in ways.items():
                for _ in range(3):  # the first two give up the memory of the way before, and take their own
                    _change(model)
                    found[name], report = push()
                left[name] = sum(report.written)
                if name == next(iter(WAYS)):
                    found[NOTHING], _ = push()
                    found[JOIN] = _join(engines)
                    _check(model, engines)
                _check(model, engines[: offered[name][0]])
            for name, value in found.items() if number else ():  # in the first round everything is learned and planned
                seconds.setdefault(name, []).append(value)
    return {"bytes": nbytes, "seconds": seconds, "left": left}


def _way(
    engines: list[PipeEngine], model: nn.Module, requested: int, stack: ExitStack, count: int, options: dict[str, Any]
) -> Callable[[], tuple[float, PushReport]]:
    memory = options.get("memory_bytes")
    if isinstance(memory, float):
        options = {**options, "memory_bytes": int(memory * requested)}
    pusher = stack.enter_context(Pusher(engines[:count], **options))

    def push() -> tuple[float, PushReport]:
        begin = time.perf_counter()
        report = pusher.push(model)
        return time.perf_counter() - begin, report

    return push


def _join(engines: list[PipeEngine]) -> float:
    with Pusher(engines[1]) as pusher:
        begin = time.perf_counter()
        pusher.push(engines[0])
        return time.perf_counter() - begin


def _change(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(1).fmod_(64)


def _check(model: nn.Module, engines: list[PipeEngine]) -> None:
    expected = {float(parameter[-1, -1]) for parameter in model.parameters()}
    for engine in engines:
        if engine.first_values() != expected:
            raise AssertionError(f"{engine.name} does not have what was pushed")


def _copy(model: nn.Module) -> float:
    copies = [torch.zeros_like(parameter) for parameter in model.parameters()]
    synchronize(copies)
    begin = time.perf_counter()
    for copied, parameter in zip(copies, model.parameters(), strict=True):
        copied.copy_(parameter)
    synchronize(copies)
    return time.perf_counter() - begin


def _stream(nbytes: int) -> float:
    """Receive into one buffer, so that only the socket needs memory."""
    piece = bytes(1 << 22)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as connection:
                for _ in range(-(-nbytes // len(piece))):
                    connection.sendall(piece)

        thread = threading.Thread(target=send)
        begin = time.perf_counter()
        thread.start()
        connection, _ = listener.accept()
        with connection:
            buffer = bytearray(len(piece))
            while connection.recv_into(buffer):
                pass
        thread.join()
        return time.perf_counter() - begin


def grid(document: dict[str, Any]) -> Grid:
    """Return the results as a table."""
    from benchmarks.tables import Grid  # needs rich

    nbytes, left = document["bytes"], document["left"]
    medians = {name: statistics.median(values) for name, values in document["seconds"].items()}
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{seconds:.3f}",
            "" if name == NOTHING else f"{nbytes / seconds / 1e9:.2f}",
            f"{seconds / medians[COPY]:.1f}",
            f"{left[name] / nbytes:.2f}" if name in left else "",
        )
        for name, seconds in medians.items()
    ]
    machine = document["header"]["machine"]
    remark = (
        f"{nbytes / 1e9:.2f} GB in bfloat16, medians of {document['header']['settings']['rounds']} rounds, on "
        f"{machine['cores']} cores ({machine['processor']})"
    )
    columns = ("", "seconds", "GB/s of the model", "x one copy", "models that left the sender")
    return Grid("Measured", columns, rows, (remark,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="of an engine")
    parser.add_argument("--cuda", action="store_true", help="weights on GPUs, on both sides")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    settings = {"mebibytes": options.mebibytes, "rounds": options.rounds, "workers": options.workers}
    found = measure(options.mebibytes << 20, options.rounds, options.workers, "cuda" if options.cuda else "cpu")
    from rich.console import Console

    from benchmarks.tables import show

    document = {"header": header("python -m benchmarks.push", settings, Path.cwd()), **found}
    show(grid(document), Console())
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
