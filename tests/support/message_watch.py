"""Count the bytes that a rank sends to and receives from other ranks, by exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bytecheckpoint import telemetry
from bytecheckpoint.control.router import OperationState, Router

__all__ = ["MessageCounts", "counted_messages"]


class MessageCounts:
    """Bytes of the payloads that this rank sent and received, by exchange (``agree``, ``verdict``, ...) of saves."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.before_staging = 0

    @property
    def has_new_plan(self) -> bool:
        return "summary" in self.sent or "summary" in self.received


@contextmanager
def counted_messages() -> Iterator[MessageCounts]:
    """Count on this rank. ``before_staging`` counts the bytes exchanged before the first save began to stage."""
    counts, is_staging = MessageCounts(), False

    def count(exchanges: dict[str, int], state: OperationState, phase: str, payload: bytes) -> None:
        phase = phase.partition("~")[0]
        if state.kind == "save":
            exchanges[phase] = exchanges.get(phase, 0) + len(payload)
            if not is_staging:
                counts.before_staging += len(payload)

    def observer(name: str, event: str) -> None:
        nonlocal is_staging
        is_staging = is_staging or (name == "save.stage" and event == "enter")

    send, take = Router.send_payload, Router.take_payload

    def counting_send(router: Router, peer: int, state: OperationState, phase: str, payload: bytes) -> None:
        count(counts.sent, state, phase, payload)
        send(router, peer, state, phase, payload)

    def counting_take(router: Router, state: OperationState, phase: str, sender: int) -> bytes:
        payload = take(router, state, phase, sender)
        count(counts.received, state, phase, payload)
        return payload

    stop: Any = telemetry.observe(observer)
    try:
        with (
            mock.patch.object(Router, "send_payload", counting_send),
            mock.patch.object(Router, "take_payload", counting_take),
        ):
            yield counts
    finally:
        stop()
