"""Agree on one last save when an exception has ended training: which ranks take part, and what is recorded of it."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import msgpack
import torch

from ..control.base import Operation
from ..errors import ControlError, DeadlineError, StateError

__all__ = ["agree_on_last_save"]

_MAX_MESSAGE = 2000  # characters
_POLL_S = 0.02


class _Report(NamedTuple):
    """What one rank sends to rank 0. ``step`` is the last one for which it called ``save``; -1 if there is none."""

    step: int
    error_type: str
    message: str
    is_consequence: bool  # of a failure on another rank


def agree_on_last_save(op: Operation, step: int | None, error: BaseException, deadline_s: float) -> dict[str, Any]:
    """Wait until all ranks have joined, and return what the checkpoint records of the exception.

    Args:
        op: An operation that every rank enters when it leaves the training loop.
        step: The last step that this rank completed.
        error: The exception that made this rank leave.
        deadline_s: How long to wait for the device.

    Returns:
        A map of ``type``, ``message``, ``rank`` and ``steps`` (the lowest and the highest of the ranks), the same on
        every rank.

    Raises:
        StateError: Some rank has not completed a step, so its state is not worth saving.
        ControlError: Some rank did not join, or its device is busy.
    """
    with op.phase("device"):
        _wait_for_device(deadline_s)
    is_consequence = isinstance(error, ControlError)
    packed = op.gather(
        "join", msgpack.packb(_Report(-1 if step is None else step, type(error).__name__, _text(error), is_consequence))
    )
    response = None
    if packed is not None:
        with op.phase("decide"):
            response = msgpack.packb(_decide([_Report(*msgpack.unpackb(one)) for one in packed]))
    decision: dict[str, Any] = msgpack.unpackb(op.broadcast("decision", response))
    return decision


def _decide(reports: list[_Report]) -> dict[str, Any]:
    steps = [one.step for one in reports]
    if min(steps) < 0:
        raise StateError(f"rank {steps.index(min(steps))} has not completed a step since it started or resumed")
    rank = min(range(len(reports)), key=lambda number: (reports[number].is_consequence, number))
    cause = reports[rank]
    return {"type": cause.error_type, "message": cause.message, "rank": rank, "steps": [min(steps), max(steps)]}


def _wait_for_device(deadline_s: float) -> None:
    """Wait for the work that was queued before. A collective that another rank never entered would block a copy."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    give_up, never = time.monotonic() + deadline_s, threading.Event()
    stream = torch.cuda.current_stream()
    while not stream.query():
        if time.monotonic() > give_up:
            raise DeadlineError(
                f"{stream.device} is still busy after {deadline_s:g} s, probably in a collective that other ranks left"
            )
        never.wait(_POLL_S)


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - __str__ of a foreign exception may raise anything
        return ""
    return text[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
