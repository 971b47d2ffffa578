"""Apply a version to one engine: lease, pause, load, resume; or revert, so that it serves one consistent version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BytecheckpointError, EngineError
from ...telemetry.trace import notify
from .engines.base import Budget, Engine, ask_all, failure_of
from .leases import HeldLease, check_consistent, push_command, resume_command, settle
from .messages import first_cause

__all__ = ["EngineCommit"]

_CLEANUP_S = 5.0  # at least, for requests that must still reach an engine when the time of the stage is up
_LEASE_SLACK_S = 30.0  # for reverting, after the stage

_log = logging.getLogger(__name__)


@dataclass
class EngineCommit:
    """The second phase of the commit on one engine: ``load``, then ``finish`` or ``undo``, once each.

    An engine whose consistency is unknown is left paused, and so is one that ``was_inconsistent`` before and cannot be
    paused. When the engine answers after the coordinator ``is_abandoned``, the next push may have begun, and this one
    sends it no further request. ``holder`` is the receiver of the engine's first worker, which holds the lease.
    """

    engine: Engine
    message: Mapping[str, Any]
    holder: str
    was_inconsistent: bool = False
    is_abandoned: Callable[[], bool] = lambda: False
    _lease: HeldLease | None = field(default=None, init=False)
    _is_paused: bool = field(default=False, init=False)
    _is_loaded: bool = field(default=False, init=False)

    def load(self, request: str, budget: Budget) -> BytecheckpointError | None:
        """Pause the engine and load the version by ``request``. Returns what went wrong, if anything; then ``undo``
        has no more to do."""
        engine, version = self.engine, self.message["version"]
        try:
            self._lease = HeldLease(engine, self.message["transaction"], self.holder, budget.left + _LEASE_SLACK_S)
            notify("push.apply.leased", "point")
            engine.pause(budget.left)
        except BytecheckpointError as error:
            if not self.was_inconsistent:
                self._resume_quietly(None, changed=False)
            return error
        self._is_paused = True
        notify("push.apply.paused", "point")
        try:
            answers = ask_all(engine, request, self.message, budget.left)
            if self.is_abandoned():
                return self._abandoned(f"{engine.name} answered after the push had given up; it is left paused")
        except BytecheckpointError as error:
            return self._abandoned(
                f"{error}\n  it is unknown whether {engine.name} serves version {version!r} now; it is left paused. If "
                f"its workers answer again, it resumes, or {resume_command(engine)}",
                type(error),
            )
        failures = [failure_of(engine, number, answer) for number, answer in enumerate(answers)]
        errors = [error for error in failures if error is not None]
        if not errors:
            self._is_loaded = True
            notify("push.apply.loaded", "point")
            return None
        first = first_cause(errors)
        before, after = self._revert(budget)
        if after is None:
            self._resume_quietly(before, changed=True)
        else:
            self._end_lease()
            first.args = (f"{first}\n  and {after}\n  {engine.name} is left paused; {push_command(engine)}",)
        return first

    def finish(self, budget: Budget) -> BytecheckpointError | None:
        """Resume the engine with the loaded version. Returns what went wrong, if anything."""
        engine, version = self.engine, self.message["version"]
        try:
            engine.resume(version, max(budget.left, _CLEANUP_S), changed=True)
        except BytecheckpointError as error:
            return self._abandoned(
                f"{engine.name} has version {version!r}, but does not resume: {error}; {resume_command(engine)}"
            )
        notify("push.apply.resumed", "point")
        self._end_lease()
        return None

    def undo(self, budget: Budget) -> BytecheckpointError | None:
        """Revert the engine, because another one could not load the version, and resume it. Returns what went wrong,
        if anything. An engine that cannot revert continues with the new version."""
        if not self._is_loaded:
            return None
        engine, version = self.engine, self.message["version"]
        serves, error = self._revert(budget)
        if error is not None:
            self._end_lease()
            return error
        try:
            engine.resume(serves, max(budget.left, _CLEANUP_S), changed=True)
        except BytecheckpointError as raised:
            return self._abandoned(f"{engine.name} does not resume: {raised}; {resume_command(engine)}")
        self._end_lease()
        if serves == version:
            return EngineError(f"{engine.name} cannot revert and continues with version {serves!r}")
        return None

    def interrupt(self, *, is_complete: bool) -> None:
        """Make the engine serve one complete version after this process was interrupted: the new one if all engines
        have loaded it (``is_complete``), else the old one if possible. Logs what fails."""
        if self._lease is None and not self._is_paused:
            return
        try:
            if not is_complete:
                ask_all(self.engine, "revert", self.message, _CLEANUP_S)
            settle(self.engine, _CLEANUP_S, self.message["transaction"])
            self._end_lease()
        except BytecheckpointError as error:
            text = f"{self.engine.name} is left paused: {error}; {resume_command(self.engine)}"
            _log.error("push: interrupted; %s", text)
            self.abandon()

    def abandon(self) -> None:
        """Leave the engine to the holder of the lease, which settles the push as soon as the workers answer."""
        if self._lease is not None:
            self._lease.lose()
            self._lease = None

    def _abandoned(self, text: str, kind: type[BytecheckpointError] = EngineError) -> BytecheckpointError:
        self.abandon()
        return kind(text)

    def _revert(self, budget: Budget) -> tuple[int | str | None, BytecheckpointError | None]:
        try:
            answers = ask_all(self.engine, "revert", self.message, max(budget.left, _CLEANUP_S))
            return check_consistent(self.engine, answers), None
        except BytecheckpointError as error:
            return None, error

    def _resume_quietly(self, version: int | str | None, *, changed: bool) -> None:
        try:
            self.engine.resume(version, _CLEANUP_S, changed=changed)
        except BytecheckpointError as error:
            _log.warning("push: %s does not resume: %s; %s", self.engine.name, error, resume_command(self.engine))
            self.abandon()
        else:
            self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.end(_CLEANUP_S)
            self._lease = None
