"""What all parts of one operation on one rank share: where it stands, its lines, and the error that it ends with."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import BytecheckpointError
from .failure import FailureRecord
from .line import Line, LineLost
from .peers import PeerIdentity

if TYPE_CHECKING:
    from .store import StoreCommunicator

__all__ = ["LATE_S", "LONGEST_PAUSE_S", "ROOT_GRACE_S", "OperationContext", "Outcome"]

LONGEST_PAUSE_S = 0.01
"""Between two looks at the store, in small jobs."""

LATE_S = 0.5
"""For how long a store is asked once a deadline has passed, since all are to hear of it within two seconds, or once an
operation is over."""

ROOT_GRACE_S = 1.0
"""For how long the other ranks leave the verdict on who is late to rank 0."""

_STEP_GRACE_S = 0.2  # and those further down to those further up, who know of more ranks


class Outcome:
    """The one error that an operation ends with on this rank, whichever thread meets it first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: tuple[FailureRecord, BytecheckpointError] | None = None
        self.error: BytecheckpointError | None = None

    def own(self, error: BaseException, phase: str, here: PeerIdentity, about: str = "") -> FailureRecord:
        """The record of a failure of this rank, to be reported. Should it stand, this rank raises the error itself:
        as it is when it is of this library, else a ``RankFailedError`` from it."""
        record = replace(FailureRecord.of_error(error, phase, here), about=about)
        raised = error
        if not isinstance(raised, BytecheckpointError):
            raised = record.rank_failed()
            raised.__cause__ = error
        with self._lock:
            self._own = record, raised
        return record

    def settle(self, record: FailureRecord) -> BytecheckpointError:
        """Take the failure that stands, unless there is an error already; the error to raise."""
        with self._lock:
            if self.error is None:
                self.error = self._own[1] if self._own and self._own[0] == record else record.error()
            return self.error

    def keep(self, error: BytecheckpointError) -> None:
        """Take an error that all ranks raise without a report."""
        with self._lock:
            self.error = self.error or error

    def forget(self) -> None:
        """Tracebacks hold the frames of the failed phase, and so what they refer to."""
        with self._lock:
            self.error = self._own = None


@dataclass
class OperationContext:
    """One operation on one rank. Thread-safe; ``phase`` is the exchange that was entered last."""

    communicator: StoreCommunicator
    kind: str
    prefix: str
    deadline_s: float
    outcome: Outcome = field(default_factory=Outcome)
    phase: str = "the beginning"
    about: str = ""
    _lines: dict[int, Line] = field(default_factory=dict)
    _lost: dict[int, LineLost] = field(default_factory=dict)
    _patience_s: float = math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def grace_s(self) -> float:
        """How much longer than its deadline this rank waits for its parent, before it names who is late."""
        depth = self.communicator.tree.depth(self.communicator.rank)
        return ROOT_GRACE_S + (depth - 1) * _STEP_GRACE_S if depth else 0.0

    def line_to(self, server: int) -> Line:
        """This operation's line to that rank's store. Raises ``LineLost``, and once it could not connect, always."""
        with self._lock:
            if server in self._lost:
                raise LineLost(str(self._lost[server]), server, is_silent=self._lost[server].is_silent)
            if server not in self._lines:
                try:
                    patience_s = min(self.deadline_s, self._patience_s)
                    self._lines[server] = self.communicator.lines.borrow(server, patience_s)
                except LineLost as error:
                    self._lost[server] = error
                    raise
            return self._lines[server]

    def hurry(self, patience_s: float) -> None:
        """Ask no store for longer than that any more."""
        with self._lock:
            self._patience_s = min(self._patience_s, patience_s)
            lines = list(self._lines.values())
        for line in lines:
            line.be_patient(self._patience_s)

    def above(self) -> Line:
        """To the parent's store; on rank 0, to its own. Failures of others are seen here."""
        return self.line_to(self.communicator.tree.parent(self.communicator.rank))

    def below(self) -> Line:
        """To this rank's own store."""
        return self.line_to(self.communicator.rank)

    def give_lines_back(self) -> None:
        with self._lock:
            lines = list(self._lines.values())
            self._lines.clear()
        for line in lines:
            self.communicator.lines.give_back(line)
