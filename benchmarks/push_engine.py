"""An engine for benchmarks: processes with the real receiver and layers split between them, without a model."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import DeadlineError, EngineError
from bytecheckpoint.inference.push import Engine, Receiver
from bytecheckpoint.inference.push.block_quantization import Blocks
from bytecheckpoint.inference.push.engine_model import EngineModel
from bytecheckpoint.inference.push.transports.cuda_ipc import compute_device

__all__ = ["LAYER_ROWS", "PipeEngine", "trainee"]

LAYER_ROWS = 2048
_COLUMNS = 2048
_LOOK_S = 60.0


def trainee(nbytes: int) -> nn.Module:
    """Layers in bfloat16, of at least this many bytes."""
    count = -(-nbytes // (LAYER_ROWS * _COLUMNS * 2))
    return nn.ModuleList(_Layer(LAYER_ROWS) for _ in range(count))


class _Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, _COLUMNS, dtype=torch.bfloat16), requires_grad=False)


class _Model(nn.Module):
    """Worker ``rank`` of ``tp`` holds its rows of every layer."""

    def __init__(self, layers: int, tp: int, rank: int) -> None:
        super().__init__()
        self.rows, self.rank = LAYER_ROWS // tp, rank
        self.layers = nn.ModuleList(_Layer(self.rows) for _ in range(layers))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer = self.layers[int(name.partition(".")[0])]
            assert isinstance(layer, _Layer)
            layer.weight.copy_(tensor.narrow(0, self.rank * self.rows, self.rows))


class _Worker(EngineModel):
    """An ``EngineModel``."""

    quantized = False
    blocks: Blocks | None = None

    def __init__(self, layers: int, tp: int, rank: int) -> None:
        self._shape = layers, tp, rank
        self.model = _Model(*self._shape)

    def make(self) -> nn.Module:
        with torch.device("meta"):
            return _Model(*self._shape)

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert isinstance(model, _Model)
        model.load_weights(weights)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)

    def restore(self) -> bool:
        return False

    def clear_caches(self) -> None:
        """Does nothing: there are no caches."""


class PipeEngine(Engine):
    """``tp`` processes, which answer through pipes. Their layers are on the CPU or, by "cuda", on all GPUs in turn."""

    def __init__(self, name: str, layers: int, tp: int, device: str = "cpu") -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for rank in range(tp):
            ours, theirs = context.Pipe()
            arguments = theirs, layers, tp, rank, device
            context.Process(target=_serve, args=arguments, daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return self._ask(request, timeout_s)

    def first_values(self) -> set[float]:
        """Return a digest of all layers of all workers."""
        return {value for values in self._ask(None, _LOOK_S) for value in values}

    def pause(self, timeout_s: float) -> None:
        """Do nothing: no request is running."""

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Do nothing: no request is running."""

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()

    def _ask(self, request: str | None, timeout_s: float) -> list[Any]:
        end = time.monotonic() + timeout_s
        try:
            for pipe in self._pipes:
                pipe.send(request)
            answers = [pipe.recv() for pipe in self._pipes if pipe.poll(max(end - time.monotonic(), 0))]
        except (EOFError, OSError) as error:
            raise EngineError(f"a process of {self.name} has ended: {error!r}") from error
        if len(answers) < len(self._pipes):
            raise DeadlineError(f"a process of {self.name} did not answer within {timeout_s:g} s")
        return answers


def _serve(pipe: Connection, layers: int, tp: int, rank: int, device: str) -> None:
    torch.set_num_threads(1)
    worker = _Worker(layers, tp, rank)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        worker.model.cuda()
    receiver = Receiver(worker, device=compute_device() if device == "cuda" else None)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is not None:
            pipe.send(receiver.answer(request))
        else:
            pipe.send([float(parameter[-1, -1]) for parameter in worker.model.parameters()])
