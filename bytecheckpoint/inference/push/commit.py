"""The second phase on one engine: pause, put in, resume; or take back, so that it serves one whole version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import BytecheckpointError, EngineError
from .engines import Budget, Engine, ask_all, failure_of
from .messages import first_cause

__all__ = ["apply_on", "take_back"]

_LAST_WORDS_S = 5.0  # for what has to be said to an engine when the time for the stage is up

_log = logging.getLogger(__name__)


def apply_on(
    engine: Engine,
    message: Mapping[str, Any],
    version: int | str,
    budget: Budget,
    request: str,
    *,
    was_torn: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> BytecheckpointError | None:
    """What went wrong with ``request``, which puts a version in, if anything. An engine of which it is not known that
    it serves one whole version is left paused, as one that ``was_torn`` before. Once it is ``given_up``, when the
    engine answers so late that a next push may have begun, nothing more is said to it."""
    try:
        engine.pause(budget.left)
    except BytecheckpointError as error:
        if not was_torn:
            _resume_quietly(engine, None, changed=False)
        return error
    try:
        answers = ask_all(engine, request, message, budget.left)
        if given_up():
            return EngineError(f"{engine.name} answered when it was waited for no more; it is left paused")
    except BytecheckpointError as error:
        return type(error)(
            f"{error}\n  whether {engine.name} serves version {version!r} now is not known; it is left paused, and the "
            "next push resumes it"
        )
    failures = [failure_of(engine, number, answer) for number, answer in enumerate(answers)]
    errors = [error for error in failures if error is not None]
    if not errors:
        return _resume(engine, version, budget)
    first = first_cause(errors)
    before, after = _revert(engine, message, budget)
    if after is None:
        _resume_quietly(engine, before, changed=True)
        return first
    first.args = (f"{first}\n  and {after}\n  {engine.name} is left paused; push again, or restart it",)
    return first


def take_back(engine: Engine, message: Mapping[str, Any], budget: Budget) -> BytecheckpointError | None:
    """For an engine that has put in what another could not. What went wrong, if anything; where there is no way back,
    it goes on with what it has."""
    try:
        engine.pause(max(budget.left, _LAST_WORDS_S))
        serves, error = _revert(engine, message, budget)
        if error is None:
            engine.resume(serves, max(budget.left, _LAST_WORDS_S), changed=True)
            if serves == message["version"]:
                return EngineError(f"{engine.name} has no way back and goes on with version {serves!r}")
        return error
    except BytecheckpointError as error:
        return error


def _revert(
    engine: Engine, message: Mapping[str, Any], budget: Budget
) -> tuple[int | str | None, BytecheckpointError | None]:
    """The version that all of its workers then serve, or the error."""
    try:
        answers = ask_all(engine, "revert", message, max(budget.left, _LAST_WORDS_S))
    except BytecheckpointError as error:
        return None, error
    torn = [answer["torn"] for answer in answers if answer["torn"]]
    if torn:
        return None, EngineError(f"{engine.name} serves no whole version: {torn[0]}")
    if len({answer["put_in_by"] for answer in answers}) > 1:
        versions = ", ".join(f"{answer['version']!r}" for answer in answers)
        return None, EngineError(f"workers of {engine.name} serve different versions: {versions}")
    return answers[0]["version"], None


def _resume(engine: Engine, version: int | str, budget: Budget) -> BytecheckpointError | None:
    try:
        engine.resume(version, max(budget.left, _LAST_WORDS_S), changed=True)
    except BytecheckpointError as error:
        return EngineError(f"{engine.name} has version {version!r}, but does not go on: {error}")
    return None


def _resume_quietly(engine: Engine, version: int | str | None, *, changed: bool) -> None:
    try:
        engine.resume(version, _LAST_WORDS_S, changed=changed)
    except BytecheckpointError as error:
        _log.warning("push: %s does not go on: %s", engine.name, error)
