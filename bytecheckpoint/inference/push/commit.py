"""Apply a version to one engine: lease, pause, load, resume; or revert, so that it serves one consistent version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BytecheckpointError, EngineError
from ...telemetry.trace import notify
from .engines.base import Budget, Engine, ask, ask_all, failures_of
from .leases import HeldLease, Inconsistent, check_consistent, check_own, push_command, resolve, resume_command
from .messages import first_cause

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
    _applied_by: str | None = field(default=None, init=False)  # the transaction of the loaded version

    @property
    def is_loaded(self) -> bool:
        return self._applied_by is not None

    def load(self, request: str, budget: Budget) -> BytecheckpointError | None:
        """Pause the engine and load the version by ``request``. Returns what went wrong, if anything; then ``undo``
        has no more to do."""
        engine, version = self.engine, self.message["version"]
        try:
            lease_s = budget.left + _LEASE_SLACK_S
            self._lease = HeldLease(engine, self.message["transaction"], self.holder, lease_s, budget.left)
        except BytecheckpointError as error:
            return error
        notify("push.apply.leased", "point")
        try:
            engine.pause(budget.left)
        except BytecheckpointError as error:
            if not self.was_inconsistent:
                self._resume_after(error, None, changed=False)
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
        errors = failures_of(engine, answers)
        if not errors:
            self._applied_by = answers[0]["applied_by"]
            notify("push.apply.loaded", "point")
            return None
        first = first_cause(errors)
        try:
            before, _ = self._revert(budget)
        except Inconsistent as error:
            self._end_lease()
            first.args = (f"{first}\n  and {error}\n  {engine.name} is left paused; {push_command(engine)}",)
        except BytecheckpointError as error:
            first.args = (f"{first}\n  and {self._unknown(error)}",)
        else:
            self._resume_after(first, before, changed=True)
        return first

    def finish(self, budget: Budget) -> BytecheckpointError | None:
        """Resume the engine with the loaded version. Returns what went wrong, if anything."""
        engine, version = self.engine, self.message["version"]
        try:
            self._resume(version, Budget(max(budget.left, _CLEANUP_S)), changed=True)
        except BytecheckpointError as error:
            return self._abandoned(
                f"{engine.name} has version {version!r}, but does not resume: {error}; {resume_command(engine)}"
            )
        notify("push.apply.resumed", "point")
        self._end_lease()
        return None

    def undo(self, budget: Budget) -> BytecheckpointError | None:
        """Revert the engine, because another one could not load the version, and resume it. Returns what went wrong,
        if anything. An engine that cannot revert is left paused: engines switch together, or not at all."""
        if not self.is_loaded:
            return None
        engine = self.engine
        try:
            serves, is_reverted = self._revert(budget)
            if is_reverted:
                self._resume(serves, Budget(max(budget.left, _CLEANUP_S)), changed=True)
        except Inconsistent as error:
            self._end_lease()
            return EngineError(f"{error}\n  {engine.name} is left paused; {push_command(engine)}")
        except BytecheckpointError as error:
            return self._unknown(error)
        self._end_lease()
        return None if is_reverted else EngineError(self._cannot_revert())

    def interrupt(self, budget: Budget, *, is_complete: bool, is_alone: bool) -> None:
        """Make the engine serve one complete version after this process was interrupted: the new one if all engines
        have loaded it (``is_complete``), else the old one. An engine that cannot revert serves the new one if it
        ``is_alone``, and is left paused otherwise. Logs what fails."""
        if self._lease is None and not self._is_paused:
            return
        try:
            budget = Budget(max(budget.left, _CLEANUP_S))
            if not is_complete and not self._revert(budget)[1] and not is_alone:
                _log.error("push: interrupted; %s", self._cannot_revert())
            else:
                resolve(self.engine, budget.left, self.message["transaction"])
            self._end_lease()
        except BytecheckpointError as error:
            text = f"{self.engine.name} is left paused: {error}; {resume_command(self.engine)}"
            _log.error("push: interrupted; %s", text)
        finally:
            self.abandon()  # unless it has ended

    def abandon(self) -> None:
        """Leave the engine to the holder of the lease, which resolves the push as soon as the workers answer."""
        if self._lease is not None:
            self._lease.lose()
            self._lease = None

    def _abandoned(self, text: str, kind: type[BytecheckpointError] = EngineError) -> BytecheckpointError:
        self.abandon()
        return kind(text)

    def _unknown(self, error: BytecheckpointError) -> BytecheckpointError:
        """Leave the engine paused, because it may not have returned to the version before."""
        return self._abandoned(
            f"{error}\n  it is unknown what {self.engine.name} serves now; it is left paused. If its workers answer "
            f"again, it resumes, or {resume_command(self.engine)}",
            type(error),
        )

    def _cannot_revert(self) -> str:
        return (
            f"{self.engine.name} has version {self.message['version']!r} and cannot return to the one before, so it is "
            f"left paused, as another engine does not have it; {resume_command(self.engine)}"
        )

    def _revert(self, budget: Budget) -> tuple[int | str | None, bool]:
        """Return what the engine serves after a revert, and whether that is not this version any more. Raises
        ``Inconsistent``, or another error when it is unknown."""
        answers = ask_all(self.engine, "revert", self.message, max(budget.left, _CLEANUP_S))
        serves = check_consistent(self.engine, answers)
        loaded_by = self.message["transaction"] if self._applied_by is None else self._applied_by
        return serves, answers[0]["applied_by"] != loaded_by

    def _resume(self, version: int | str | None, budget: Budget, *, changed: bool) -> None:
        """Resume the engine, unless another push has begun while this process was stopped: that one has paused it."""
        answers = ask(self.engine, "status", {}, budget.left)
        check_own(self.engine, answers, self.message["transaction"])
        self.engine.resume(version, budget.left, changed=changed)

    def _resume_after(self, error: BytecheckpointError, version: int | str | None, *, changed: bool) -> None:
        """Resume the engine after an error. Adds to the error that it does not resume."""
        try:
            self._resume(version, Budget(_CLEANUP_S), changed=changed)
        except BytecheckpointError as raised:
            command = resume_command(self.engine)
            error.args = (f"{error}\n  and {self.engine.name} does not resume: {raised}; {command}",)
            self.abandon()
        else:
            self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.end(_CLEANUP_S)
            self._lease = None
