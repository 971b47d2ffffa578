"""Engines whose workers run without this library.

Such workers request no parts of tensors, offer no memory and verify nothing. Rank 0 therefore runs the receiver of the
engine in its own process. To the senders, the engine has one worker, which requests every tensor completely and passes
it on. Rank 0 has no lease on the engine; when rank 0 is killed, a guard process on its host ends the pause.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import DeadlineError, StateError
from ...runtime.threads import run_daemon
from .block_quantization import Blocks
from .engine_model import EngineModel
from .engines.base import split_target
from .engines.vllm import HttpEngine
from .guard import ExitGuard
from .messages import decode
from .receiver import Receiver

_PATIENCE = 0.8  # of a sender's deadline: the error of this end names the silent worker, so it must come first

Step = tuple[str, Mapping[str, Any] | None]
"""The path of an endpoint, and the document to post there."""


class RelayModel(EngineModel):
    """An ``EngineModel`` that requests every tensor completely, and passes on what it loads."""

    quantized = False
    blocks: Blocks | None = None

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.patience_s = self.end = 0.0
        self.version: int | str | None = None  # of the next load; None when it is unknown

    def make(self) -> nn.Module:
        return nn.Module()

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            torch.empty(tensor.shape, dtype=self.sent_as(tensor.dtype), device="meta").copy_(tensor)

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of this dtype are passed on."""
        target = self._dtype
        if target is None or not dtype.is_floating_point or dtype.itemsize <= target.itemsize:
            return dtype
        return target

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def restore(self) -> bool:
        return False

    def clear_caches(self) -> None:
        """Does nothing: there is no request for it."""

    @property
    def is_busy(self) -> bool:
        """Whether the engine still handles an update, which needs the guard."""
        return False


class RelayEngine(HttpEngine):
    """An engine over HTTP to which rank 0 passes on the model. The options are those of ``HttpEngine``."""

    def __init__(self, url: str, model: RelayModel, **options: Any) -> None:
        super().__init__(url, **options)
        self._relayed = model
        self._receiver = Receiver(model, logging.DEBUG)  # this process raises failures as well
        self._busy = threading.Lock()
        self._guard: ExitGuard | None = None

    @property
    def guard(self) -> ExitGuard:
        if self._guard is None:
            self._guard = ExitGuard()
            self._guard.trust(self._tls)
        return self._guard

    def on_exit(self, *steps: Step, is_partial: bool = False) -> None:
        """Set what the guard posts if this process is killed, each step after the one before has succeeded. An engine
        that has a part of a version stays paused (``is_partial``), and the guard reports it."""
        fault = f"{self.name} has a part of a version and is left paused; push again, or restart it"
        requests = [(f"{self.name}{path}", self._headers, document) for path, document in steps]
        self.guard.request(requests, fault if is_partial else "")

    def call(self, request: str, timeout_s: float) -> list[str]:
        end = time.monotonic() + timeout_s
        target, _ = split_target(request)
        if target is not None:
            raise StateError(f"{self.name} accepts only its model, because its protocol has no other targets")
        if not self._busy.acquire(timeout=timeout_s):
            raise DeadlineError(f"{self.name} still handles an earlier request")
        try:
            message = decode(request)
            if "deadline_s" in message:
                self._relayed.patience_s = _PATIENCE * message["deadline_s"]
            self._relayed.version = None if message["kind"] == "revert" else message.get("version")
            self._relayed.end = end
            # In a thread: an interrupt of this one must not leave the engine with a part of the weights.
            answered = run_daemon(lambda: self._receiver.answer(request), "bcp-push-relay")
        except BaseException:
            self._busy.release()
            raise
        answered.add_done_callback(lambda _: self._busy.release())
        return [answered.result()]  # the model observes the deadline, and reports what is late

    @property
    def address(self) -> dict[str, Any] | None:
        return None  # its workers have no receiver, so they do not know what they serve

    def close(self) -> None:
        self._receiver.close()
        if self._guard is not None and not self._relayed.is_busy:
            self._guard.close()
            self._guard = None
