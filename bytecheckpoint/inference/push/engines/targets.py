"""What of an engine a request is for: its model, or something that is served beside it and has a receiver of its own.

A request for another target is the same text with the target in front of it, so nothing else knows of targets: not who
leads a push, and not the receivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import BytecheckpointError, FormatError
from .engines import Engine
from .messages import decode, encode
from .quantizing import Blocks
from .receiver import Receiver

__all__ = ["DraftEngine", "TargetEngine", "aim_of", "refusal"]

_MARK = ":"  # none of the letters of base64


class TargetEngine(Engine):
    """Something that is served beside the model of ``engine``, which its requests go through."""

    def __init__(self, engine: Engine, name: str, target: Mapping[str, Any]) -> None:
        self.name = f"{name} of {engine.name}"
        self._engine, self._target = engine, encode(target)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return self._engine.call(f"{self._target}{_MARK}{request}", timeout_s)

    def pause(self, timeout_s: float) -> None:
        self._engine.pause(timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        # The version that an engine knows is that of its model.
        self._engine.resume(None, timeout_s, changed=changed)

    def close(self) -> None:
        self._engine.close()


class DraftEngine(TargetEngine):
    """The draft model that ``engine``, a vLLM with ``--speculative-config '{"method": "draft_model", ...}'`` and the
    worker extension, speculates with: a whole model, which is pushed as one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "draft model", {"draft": True})


def aim_of(text: str) -> tuple[dict[str, Any] | None, str]:
    """Target and request; None for the engine's model. Where the target cannot be read, the text is returned as it is:
    a receiver refuses it in its answer."""
    target, mark, request = text.partition(_MARK)
    if not mark:
        return None, text
    try:
        return decode(target), request
    except FormatError:
        return None, text


def refusal(error: BytecheckpointError, request: str) -> str:
    """The answer of a worker that has no such target."""
    return Receiver(_Missing(error)).answer(request)


class _Missing:
    """An ``EngineModel`` that is not there."""

    quantized = False
    blocks: Blocks | None = None

    def __init__(self, error: BytecheckpointError) -> None:
        self._error = error

    def make(self) -> nn.Module:
        raise self._error

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise self._error

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise self._error

    def restore(self) -> bool:
        return False
