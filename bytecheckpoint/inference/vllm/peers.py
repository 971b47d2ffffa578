"""Get what a running engine serves when vLLM starts. Needs vLLM.

It is a join (``push/joins.py``) before vLLM processes the weights. Rank 0 coordinates it; requests to this engine's
workers are exchanges of the ranks, because vLLM does not answer requests yet.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from ...control.base import Operation
from ...control.single import SingleProcess
from ...errors import BytecheckpointError
from ..push.engines.base import Engine
from ..push.engines.vllm import TOKEN_VARIABLE, HttpEngine
from ..push.pusher import Pusher
from ..push.receiver import Receiver
from ..push.transports.cuda_ipc import compute_device
from .model import VllmModel, keep_receiver

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
    config: Any = get_current_vllm_config()
    loading = VllmModel(config, model)
    loading.is_starting = True
    receiver = Receiver(loading, device=compute_device())
    end = _coordinate(op, receiver, url, deadline_s, token) if op.rank == 0 else _follow(op, receiver)
    loading.is_starting = False
    if end != _LOADED:
        receiver.close()
        return False
    keep_receiver(loading, receiver)
    return True


def _coordinate(op: Operation, receiver: Receiver, url: str, deadline_s: float, token: str | None) -> bytes:
    token = token or os.environ.get(TOKEN_VARIABLE)
    try:
        with Pusher(_Ranks(op, receiver), deadline_s=deadline_s, communicator=SingleProcess()) as pusher:
            report = pusher.push(HttpEngine(url, token=token))
        _log.info("loaded version %r, which %s serves", report.version, url)
        end = _LOADED
    except BytecheckpointError as error:
        _log.warning("%s did not send its weights: %s", url, error)
        end = _FAILED
    return op.broadcast(_PHASE, end)


def _follow(op: Operation, receiver: Receiver) -> bytes:
    while True:
        request = op.broadcast(_PHASE, None)
        if request in (_LOADED, _FAILED):
            return request
        op.gather(_PHASE, receiver.answer(request.decode()).encode())
