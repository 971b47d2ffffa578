"""Push into an engine when vLLM starts: what a running engine serves, or a checkpoint to quantize. Needs vLLM.

This happens before vLLM processes the weights. Rank 0 pushes; requests to this engine's workers are exchanges of the
ranks, because vLLM does not answer requests yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from ...checkpoint.checkpoint import Checkpoint
from ...control.base import Operation, SingleProcess
from ...errors import BytecheckpointError, EngineError
from ..push.engines.base import Engine
from ..push.engines.colocated import ColocatedEngines
from ..push.engines.vllm import TOKEN_VARIABLE, HttpEngine
from ..push.pusher import Pusher
from ..push.receiver import Receiver
from ..push.transports.cuda_ipc import compute_device
from .model import VllmModel, keep_receiver, receiver_of

_PHASE = "peer"

_log = init_logger(f"vllm.{__name__}")


class _Loading(Engine):
    """The worker of this rank, which loads and serves nothing yet."""

    name = "the engine that starts"

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [self._receiver.answer(request)]

    def pause(self, timeout_s: float) -> None:
        return

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
    engines = ColocatedEngines(_Loading(receiver))
    engines.name, engines.op = _Loading.name, op
    error: BytecheckpointError | None = None
    if op.rank == 0:
        try:
            with Pusher(engines, deadline_s=deadline_s, communicator=SingleProcess()) as pusher:
                push(pusher)
        except BytecheckpointError as failure:
            error = failure
        engines.dismiss()
    else:
        engines.serve()
    has_failed = op.broadcast(_PHASE, bytes([error is not None]) if op.rank == 0 else None) == bytes([True])
    if has_failed and error is None:
        error = EngineError("see the log of rank 0")
    loading.is_starting = False
    if error:
        receiver.close()
    else:
        keep_receiver(loading, receiver)
    return error
