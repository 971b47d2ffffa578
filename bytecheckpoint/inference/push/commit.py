"""Apply a version to one engine: pause, load, resume; or revert, so that the engine serves one consistent version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import BytecheckpointError, EngineError
from .engines.base import Budget, Engine, ask_all, failure_of
from .messages import first_cause

__all__ = ["apply_on", "revert_on"]

_CLEANUP_S = 5.0  # at least, for requests that must still reach an engine when the time of the stage is up

_log = logging.getLogger(__name__)


def apply_on(
    engine: Engine,
    message: Mapping[str, Any],
    version: int | str,
    budget: Budget,
    request: str,
    *,
    was_inconsistent: bool = False,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> BytecheckpointError | None:
    """Apply a version by ``request``, and return what went wrong, if anything.

    An engine whose consistency is unknown is left paused, and so is one that ``was_inconsistent`` before and cannot be
    paused. When the engine answers after the coordinator ``is_abandoned``, the next push may have begun, and this one
    sends it no further request.
    """
    try:
        engine.pause(budget.left)
    except BytecheckpointError as error:
        if not was_inconsistent:
            _resume_quietly(engine, None, changed=False)
        return error
    try:
        answers = ask_all(engine, request, message, budget.left)
        if is_abandoned():
            return EngineError(f"{engine.name} answered after the push had given up; it is left paused")
    except BytecheckpointError as error:
        return type(error)(
            f"{error}\n  it is unknown whether {engine.name} serves version {version!r} now; it is left paused, and "
            "the next push resumes it"
        )
    failures = [failure_of(engine, number, answer) for number, answer in enumerate(answers)]
    errors = [error for error in failures if error is not None]
    if not errors:
        try:
            engine.resume(version, max(budget.left, _CLEANUP_S), changed=True)
        except BytecheckpointError as error:
            return EngineError(f"{engine.name} has version {version!r}, but does not resume: {error}")
        return None
    first = first_cause(errors)
    before, after = _revert(engine, message, budget)
    if after is None:
        _resume_quietly(engine, before, changed=True)
        return first
    first.args = (f"{first}\n  and {after}\n  {engine.name} is left paused; push again, or restart it",)
    return first


def revert_on(engine: Engine, message: Mapping[str, Any], budget: Budget) -> BytecheckpointError | None:
    """Revert an engine that has applied a version that another engine could not, and return what went wrong, if
    anything. An engine that cannot revert continues with the new version."""
    try:
        engine.pause(max(budget.left, _CLEANUP_S))
        serves, error = _revert(engine, message, budget)
        if error is None:
            engine.resume(serves, max(budget.left, _CLEANUP_S), changed=True)
            if serves == message["version"]:
                return EngineError(f"{engine.name} cannot revert and continues with version {serves!r}")
        return error
    except BytecheckpointError as error:
        return error


def _revert(
    engine: Engine, message: Mapping[str, Any], budget: Budget
) -> tuple[int | str | None, BytecheckpointError | None]:
    try:
        answers = ask_all(engine, "revert", message, max(budget.left, _CLEANUP_S))
    except BytecheckpointError as error:
        return None, error
    reasons = [answer["inconsistent_reason"] for answer in answers if answer["inconsistent_reason"]]
    if reasons:
        return None, EngineError(f"{engine.name} serves no consistent version: {reasons[0]}")
    if len({answer["applied_by"] for answer in answers}) > 1:
        versions = ", ".join(f"{answer['version']!r}" for answer in answers)
        return None, EngineError(f"workers of {engine.name} serve different versions: {versions}")
    return answers[0]["version"], None


def _resume_quietly(engine: Engine, version: int | str | None, *, changed: bool) -> None:
    try:
        engine.resume(version, _CLEANUP_S, changed=changed)
    except BytecheckpointError as error:
        _log.warning("push: %s does not resume: %s", engine.name, error)
