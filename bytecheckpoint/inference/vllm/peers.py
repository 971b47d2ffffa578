"""Push into an engine when vLLM starts: what a running engine serves, or a checkpoint to quantize. Needs vLLM.

This happens before vLLM processes the weights. Rank 0 coordinates it; requests to this engine's workers are exchanges
of the ranks, because vLLM does not answer requests yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from ...checkpoint.checkpoint import Checkpoint
from ...control.base import Operation
from ...control.single import SingleProcess
from ...errors import BytecheckpointError, EngineError
from ..push.engines.base import Engine
from ..push.engines.vllm import TOKEN_VARIABLE, HttpEngine
from ..push.pusher import Pusher
from ..push.receiver import Receiver
from ..push.transports.cuda_ipc import compute_device
from .model import VllmModel, keep_receiver, receiver_of

_PHASE = "peer"
_LOADED, _FAILED = b"", b"-"  # in place of a request; neither is one

_log = init_logger(f"vllm.{__name__}")


class _Ranks(Engine):
    """The workers that load, as rank 0 reaches them."""

    name = "the engine that starts"

    def __init__(self, op: Operation, receiver: Receiver) -> None:
        self._op, self._receiver = op, receiver

    def call(self, request: str, timeout_s: float) -> list[str]:
        self._op.broadcast(_PHASE, request.encode())
        answers = self._op.gather(_PHASE, self._receiver.answer(request).encode())
        return [answer.decode() for answer in answers or ()]

    def pause(self, timeout_s: float) -> None:
        return  # it serves nothing yet

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        return


def join(op: Operation, model: nn.Module, url: str, deadline_s: float, token: str | None = None) -> bool:
    """Load what the engine at ``url`` serves into a model that vLLM is loading. Collective.

    Returns whether all ranks have loaded it. If not, because the engine cannot be reached, was not pushed to or does
    not fit, the model may be filled in part.
    """
    holder = HttpEngine(url, token=token or os.environ.get(TOKEN_VARIABLE))
    error = _load(op, model, lambda pusher: pusher.push(holder), deadline_s)
    if error:
        _log.warning("%s did not send its weights: %s", url, error)
    elif op.rank == 0:
        _log.info("loaded what %s serves", url)
    return error is None


def load_quantized(
    op: Operation, model: nn.Module, checkpoint: Checkpoint, section: str, deadline_s: float, **checks: Any
) -> None:
    """Load a checkpoint that must be quantized into a model that vLLM is loading: rank 0 pushes it. Collective."""
    error = _load(op, model, lambda pusher: pusher.push(checkpoint, section=section, **checks), deadline_s)
    with op.phase(_PHASE):
        if error:
            raise error
    receiver_of(get_current_vllm_config(), model).close()  # frees the copy of the weights


def _load(
    op: Operation, model: nn.Module, push: Callable[[Pusher], Any], deadline_s: float
) -> BytecheckpointError | None:
    """Load what rank 0 pushes. Returns why that failed; the other ranks know only that it did."""
    loading = VllmModel(get_current_vllm_config(), model)
    loading.is_starting = True
    receiver = Receiver(loading, device=compute_device())
    error = _coordinate(op, receiver, push, deadline_s) if op.rank == 0 else _follow(op, receiver)
    loading.is_starting = False
    if error:
        receiver.close()
    else:
        keep_receiver(loading, receiver)
    return error


def _coordinate(
    op: Operation, receiver: Receiver, push: Callable[[Pusher], Any], deadline_s: float
) -> BytecheckpointError | None:
    failed: BytecheckpointError | None = None
    try:
        with Pusher(_Ranks(op, receiver), deadline_s=deadline_s, communicator=SingleProcess()) as pusher:
            push(pusher)
    except BytecheckpointError as error:
        failed = error
    op.broadcast(_PHASE, _FAILED if failed else _LOADED)
    return failed


def _follow(op: Operation, receiver: Receiver) -> BytecheckpointError | None:
    while True:
        request = op.broadcast(_PHASE, None)
        if request in (_LOADED, _FAILED):
            return EngineError("see the log of rank 0") if request == _FAILED else None
        op.gather(_PHASE, receiver.answer(request.decode()).encode())
