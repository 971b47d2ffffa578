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
from .messages import decode, encode
from .receiver import Receiver

__all__ = ["aim_of", "aimed", "refusal"]

_MARK = ":"  # none of the letters of base64


def aimed(target: Mapping[str, Any], request: str) -> str:
    """``request`` for ``target``."""
    return f"{encode(target)}{_MARK}{request}"


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
