"""The one error with which an operation ends on this rank, and the reports that decide it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from ..errors import BytecheckpointError, DeadlineError
from ..runtime.messages import format_ranks
from .failure import FailureRecord
from .router import OperationState, Router
from .timings import DIRECT_REPORT_S, LATE_REPORT_S, LATE_REPORT_THROUGH_LEADER_S, REPORT_THROUGH_LEADER_S


class Outcome:
    """Thread-safe: the operation and its streams share it."""

    def __init__(self, router: Router, state: OperationState, deadline_s: float) -> None:
        self.router, self.state, self.deadline_s = router, state, deadline_s
        self._lock = threading.Lock()
        self._own: tuple[FailureRecord, BytecheckpointError] | None = None
        self.error: BytecheckpointError | None = None

    def raise_failure(self) -> None:
        """Raise the error, or the failure that has arrived."""
        if self.error is not None:
            raise self.error
        if self.state.failure is not None:
            raise self._record_first_failure(self.state.failure)

    def report_exception(self, error: BaseException, phase: str) -> BytecheckpointError:
        """Report an exception of this rank; return the error to raise.

        If this failure is the operation's first, an error of this library is returned unchanged, and any other as the
        cause of a ``RankFailedError``.
        """
        record = FailureRecord.from_exception(error, phase, self.router.here)
        record = replace(record, about=self.state.description)
        raised = error
        if not isinstance(raised, BytecheckpointError):
            raised = record.rank_failed()
            raised.__cause__ = error
        with self._lock:
            self._own = record, raised
        # A rank that missed one deadline is likely to miss the next, and the time for reports is over.
        is_late = isinstance(error, DeadlineError) or isinstance(error.__cause__, DeadlineError)
        return self._record_first_failure(self._report(record, is_late=is_late))

    def raise_record(self, record: FailureRecord, *, is_late: bool = False) -> NoReturn:
        """Report a failure and raise the operation's first. ``is_late``: a deadline has passed; do not wait long."""
        record = replace(record, about=self.state.description)
        raise self._record_first_failure(self._report(record, is_late=is_late))

    def raise_deadline(
        self, phase: str, late: Sequence[int], *, waited_s: float | None = None, context: str = ""
    ) -> NoReturn:
        """Report that this rank waited too long for the ``late`` ranks, and raise the operation's first failure."""
        here = self.router.here
        waited_s = self.deadline_s if waited_s is None else waited_s
        message = (
            f"{self.state.kind}: rank {here.rank} on {here.host} waited {waited_s:.4g} s in {phase} for rank(s) "
            f"{format_ranks(late)} of {self.router.tree.world_size}{context}. Check what they were doing at that time, "
            "or set a longer deadline."
        )
        self.raise_record(FailureRecord.from_deadline(message, phase, here), is_late=True)

    def clear(self) -> None:
        """Forget the errors."""
        with self._lock:
            self.error = self._own = None

    def _record_first_failure(self, record: FailureRecord) -> BytecheckpointError:
        with self._lock:
            if self.error is None:
                self.error = self._own[1] if self._own and self._own[0] == record else record.error()
            return self.error

    def _report(self, record: FailureRecord, *, is_late: bool) -> FailureRecord:
        """Send a failure to rank 0; return the failure of the operation, which may be another."""
        router = self.router
        if self.state.has_left:
            return record
        if router.parent == 0:
            self._report_to(record, LATE_REPORT_S if is_late else self.deadline_s, is_late=is_late)
        else:
            through_leader_s = LATE_REPORT_THROUGH_LEADER_S if is_late else REPORT_THROUGH_LEADER_S
            self._report_to(record, through_leader_s, is_late=is_late)
            if self.state.failure is None:
                direct_s = LATE_REPORT_S if is_late else DIRECT_REPORT_S
                self._report_to(record, direct_s, is_late=is_late, to_root=True)
        # Without an answer, the ranks below at least raise the same failure as this one.
        return router.decide(self.state, record)

    def _report_to(self, record: FailureRecord, timeout_s: float, *, is_late: bool, to_root: bool = False) -> None:
        router, state = self.router, self.state
        peer = 0 if to_root else router.parent
        if state.failure is None and (router.rank == 0 or not router.is_lost(state, peer)):
            router.report(state, record, to_root=to_root)
            if is_late and router.is_silent(peer):
                return  # an earlier report has waited for this peer already
            if not router.wait_until(lambda: state.failure is not None or router.is_lost(state, peer), timeout_s):
                router.probe(peer)
