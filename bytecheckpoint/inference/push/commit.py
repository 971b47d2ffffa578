"""Apply a version to one engine: lease, pause, load, resume; or revert, so that it serves one consistent version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BytecheckpointError, EngineError, StateError
from ...telemetry.trace import notify
from .engines.base import Budget, Engine, ask, ask_all, failures_of
from .leases import HeldLease, Inconsistent, check_consistent, check_own, resolve, resume_command
from .messages import first_cause

_CLEANUP_S = 5.0  # at least, for requests that must still reach an engine when the time of the stage is up
_POLL_S = 0.1
_LEASE_SLACK_S = 30.0  # for reverting, after the stage

_log = logging.getLogger(__name__)


@dataclass
class EngineCommit:
    """The second phase of the commit on one engine: ``load``, then ``finish`` or ``undo``, once each.

    An engine that serves no consistent version, or of which that is unknown, is left paused. When the engine answers
    after the coordinator ``is_abandoned``, the next push may have begun, and this one sends it no further request.
    ``answers`` are the last ones of its workers: the first one holds the lease, and another push may have left the
    engine paused.
    """

    engine: Engine
    answers: Sequence[Mapping[str, Any]]
    message: Mapping[str, Any]
    is_abandoned: Callable[[], bool] = lambda: False
    _lease: HeldLease | None = field(default=None, init=False)
    _applied_by: str | None = field(default=None, init=False)  # the transaction of the loaded version

    @property
    def is_loaded(self) -> bool:
        return self._applied_by is not None

    def load(self, request: str, budget: Budget) -> BytecheckpointError | None:
        """Pause the engine and load the version by ``request``. Returns what went wrong, if anything; then ``undo``
        has no more to do."""
        engine = self.engine
        try:
            engine.note_pause(budget.left, left_paused=any(answer["left_paused"] for answer in self.answers))
            holder, lease_s = self.answers[0]["receiver"], budget.left + _LEASE_SLACK_S
            self._lease = HeldLease(engine, self.message["transaction"], holder, lease_s, budget.left)
        except BytecheckpointError as error:
            return error
        notify("push.apply.leased", "point")
        try:
            engine.pause(budget.left)
        except BytecheckpointError as error:
            self._explain(error, self._resume(None, _CLEANUP_S, changed=False))
            return error
        notify("push.apply.paused", "point")
        try:
            answers = ask_all(engine, request, self.message, budget.left)
        except BytecheckpointError as error:
            return self._unknown(error)
        if self.is_abandoned() and answers[0]["transaction"] == self.message["transaction"]:
            self.abandon()
            return EngineError(f"{engine.name} answered after the push had given up; it is left paused")
        errors = failures_of(engine, answers)
        if errors:
            first = first_cause(errors)
            self._explain(first, self._return(budget))
            return first
        self._applied_by = answers[0]["applied_by"]
        notify("push.apply.loaded", "point")
        return None

    def finish(self, budget: Budget) -> BytecheckpointError | None:
        """Resume the engine with the loaded version. Returns what went wrong, if anything."""
        version = self.message["version"]
        fault = self._resume(version, max(budget.left, _CLEANUP_S), changed=True)
        return EngineError(f"version {version!r} is loaded, but {fault}") if fault else None

    def undo(self, budget: Budget) -> BytecheckpointError | None:
        """Revert the engine, because another one could not load the version, and resume it. Returns what went wrong,
        if anything. An engine that cannot revert is left paused: engines switch together, or not at all."""
        fault = self._return(budget) if self.is_loaded else ""
        return EngineError(fault) if fault else None

    def interrupt(self, budget: Budget, *, is_complete: bool, is_alone: bool) -> None:
        """Make the engine serve one complete version after this process was interrupted: the new one if all engines
        have loaded it (``is_complete``), else the old one. An engine that cannot revert serves the new one if it
        ``is_alone``, and is left paused otherwise. Logs what fails."""
        if self._lease is None:
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

    def abandon(self, *, revert: bool = False) -> None:
        """Leave the engine to the holder of the lease, which resolves the push as soon as the workers answer; with
        ``revert``, it first returns to the version before, if that is possible."""
        if self._lease is not None:
            self._lease.lose(revert=revert)
            self._lease = None

    def _unknown(self, error: BytecheckpointError) -> BytecheckpointError:
        """Leave the engine paused, because it may serve either version."""
        self.abandon(revert=True)
        return type(error)(
            f"{error}\n  it is unknown what {self.engine.name} serves now; it is left paused. If its workers answer "
            f"again, it resumes, or {resume_command(self.engine)}"
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

    def _return(self, budget: Budget) -> str:
        """Make the engine serve the version before, and resume it. Returns what went wrong; empty if nothing did."""
        try:
            serves, is_reverted = self._revert(budget)
        except Inconsistent as error:
            self._end_lease()
            return str(error)
        except BytecheckpointError as error:
            return str(self._unknown(error))
        if is_reverted:
            return self._resume(serves, max(budget.left, _CLEANUP_S), changed=True)
        self._end_lease()
        return self._cannot_revert()

    def _resume(self, version: int | str | None, wait_s: float, *, changed: bool) -> str:
        """Resume the engine, unless another push has begun since this one loaded: that one has paused it. Returns why
        it does not resume; empty if it does."""
        engine, budget, transaction = self.engine, Budget(wait_s), self.message["transaction"]
        try:
            answers = ask(engine, "status", {}, budget.left)
            if self.is_loaded or all(answer["transaction"] == transaction for answer in answers):
                check_own(engine, answers, transaction)
            else:
                # This process was stopped before it paused the engine, perhaps until the other push had resumed it.
                answers, version, changed = self._wait_for_other(budget), None, False
            check_consistent(engine, answers)
            engine.resume(version, budget.left, changed=changed)
        except BytecheckpointError as error:
            self.abandon()
            return f"{engine.name} does not resume: {error}; {resume_command(engine)}"
        notify("push.apply.resumed", "point")
        self._end_lease(has_resumed=True)
        return ""

    def _wait_for_other(self, budget: Budget) -> list[dict[str, Any]]:
        """Return the workers' answers when no push changes the engine. Raises ``StateError`` if one does for longer; it
        resumes the engine."""
        while True:
            answers = ask(self.engine, "status", {}, budget.left)
            if not any(answer["is_changing"] for answer in answers):
                return answers
            if budget.is_over:
                raise StateError(f"another push into {self.engine.name} has begun, and resumes it")
            time.sleep(_POLL_S)

    @staticmethod
    def _explain(error: BytecheckpointError, fault: str) -> None:
        """Add to an error what went wrong after it, if anything."""
        if fault:
            error.args = (f"{error}\n  and {fault}",)

    def _end_lease(self, *, has_resumed: bool = False) -> None:
        if self._lease is not None:
            self._lease.end(_CLEANUP_S, has_resumed=has_resumed)
            self._lease = None
