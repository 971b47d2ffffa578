"""Targets next to an engine's model: a draft model or an adapter, which has its own receiver.

A request for such a target is the plain request with the encoded target in front of it, so neither the coordinator nor
the receivers handle targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import FormatError
from ..messages import decode, encode
from .base import Engine, Wrapper

__all__ = ["DraftEngine", "TargetEngine", "split_target"]

_SEPARATOR = ":"  # not a base64 character


class TargetEngine(Wrapper):
    """A target of ``engine``, to which all requests go."""

    def __init__(self, engine: Engine, name: str, target: Mapping[str, Any]) -> None:
        super().__init__(engine, f"{name} of {engine.name}")
        self._name, self._plain, self._target = name, dict(target), encode(target)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return self._engine.call(f"{self._target}{_SEPARATOR}{request}", timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        # The engine's own version is that of its model.
        self._engine.resume(None, timeout_s, changed=changed)

    @property
    def identity(self) -> str:
        return f"{self._name} of {self._engine.identity}"

    @property
    def address(self) -> dict[str, Any] | None:
        address = self._engine.address
        return None if address is None else {**address, "target": [self._name, self._plain]}


class DraftEngine(TargetEngine):
    """The draft model of an engine that uses speculative decoding. It is pushed like any model.

    Args:
        engine: A vLLM engine with ``--speculative-config '{"method": "draft_model", ...}'`` and the worker extension.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "draft model", {"draft": True})


def split_target(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the target and the request; the target is None for the engine's model. Text with an unreadable target is
    returned unchanged, for the receiver to refuse."""
    target, separator, request = text.partition(_SEPARATOR)
    if not separator:
        return None, text
    try:
        return decode(target), request
    except FormatError:
        return None, text
