"""How an operation fails on one rank: what others reported, who was seen to end, and what this rank reports itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ..errors import BytecheckpointError
from .failure import FailureRecord
from .line import Line, LineLost
from .peers import PeerIdentity

if TYPE_CHECKING:
    from .store import StoreCommunicator

__all__ = ["LONGEST_PAUSE_S", "ROOT_GRACE_S", "Outcome", "Reports", "left_counter", "left_mark"]

_log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 0.01
"""Between two looks at the store, in small jobs."""

ROOT_GRACE_S = 1.0
"""For how long the other ranks leave the verdict on who is late to rank 0."""

_END_GRACE_S = (
    5.0  # connections of a process that was killed break before it is seen to end; on a busy host, long before
)


def left_mark(prefix: str, rank: int) -> str:
    """The key under which ``rank`` says that it has left the operation ``prefix``, and which keys it made."""
    return f"{prefix}/left/{rank}"


def left_counter(prefix: str) -> str:
    """The key that counts the ranks that have left. It goes last, when everything else of the operation is gone."""
    return f"{prefix}/left/count"


class Outcome:
    """The one error that an operation ends with on this rank, whichever thread meets it first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: tuple[FailureRecord, BytecheckpointError] | None = None
        self.error: BytecheckpointError | None = None

    def own(self, error: BaseException, phase: str, here: PeerIdentity) -> FailureRecord:
        """The record of a failure of this rank, to be reported. Should it stand, this rank raises the error itself:
        as it is when it is of this library, else a ``RankFailedError`` from it."""
        record = FailureRecord.of_error(error, phase, here)
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


class Reports:
    """The failures of one operation over one line to the store. For one thread at a time.

    ``line`` may raise ``LineLost``, and so may every method that reads; ``keys`` are those that were made.
    """

    def __init__(
        self, communicator: StoreCommunicator, kind: str, prefix: str, outcome: Outcome, line: Callable[[], Line]
    ) -> None:
        self._communicator, self._kind, self._prefix, self._outcome = communicator, kind, prefix, outcome
        self._line = line
        self.keys: list[str] = []

    @property
    def key(self) -> str:
        return f"{self._prefix}/failure"

    def raise_failure(self) -> None:
        """Raise what this rank has failed with, or what any rank has reported."""
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._line().has(self.key):
            raise self._outcome.settle(self._read())

    def raise_death(self, phase: str, waited_for: Callable[[], list[int]]) -> None:
        """Only a rank that is waited for matters: what the others had to say has come, and may be all it takes."""
        ended = self._communicator.watch.ended()
        ranks = waited_for() if ended else []
        for peer in ended:
            if peer.rank in ranks and not self._line().has(left_mark(self._prefix, peer.rank)):
                self.raise_reported(FailureRecord.of_death(peer, phase, self._death_of(peer)))

    def report(self, record: FailureRecord) -> FailureRecord:
        """Publish a failure; the one that stands, which is the first. Never raises."""
        try:
            line = self._line()
            # The bodies may be large and many; one short key decides which of them stands.
            body = f"{self.key}/{self._communicator.rank}.{threading.get_native_id()}.{len(self.keys)}"
            self.keys += line.put(body, record.pack())
            if line.put_first(self.key, body.encode()) == body.encode():
                return record
            return self._read()
        except LineLost:
            _log.debug("could not report a failure in %s: rank 0's store has ended", record.phase, exc_info=True)
            return record

    def raise_reported(self, record: FailureRecord) -> NoReturn:
        """Publish a failure and raise the one that stands."""
        raise self._outcome.settle(self.report(record))

    def raise_root_lost(self, phase: str, error: LineLost) -> NoReturn:
        """The store's end is rank 0's failure, and cannot be reported."""
        raise self._outcome.settle(self._root_lost(phase, error)) from error

    def raise_peer_lost(self, phase: str, rank: int, host: str, how: str) -> NoReturn:
        """The connection to ``rank`` broke. What it reported, or how its host saw it end, says why."""
        give_up = time.monotonic() + _END_GRACE_S
        while time.monotonic() < give_up:
            # It reports before it leaves, and leaves before it ends.
            has_left = self._line().has(left_mark(self._prefix, rank))
            self.raise_failure()
            if has_left:
                break
            self.raise_death(phase, lambda: [rank])
            time.sleep(LONGEST_PAUSE_S)
        lost = PeerIdentity(rank, host, 0, 0, "", "", "")
        self.raise_reported(FailureRecord.of_death(lost, phase, how))

    def _read(self) -> FailureRecord:
        line = self._line()
        body = line.read(self.key)[0].decode()
        return FailureRecord.unpack(line.read(body)[0])

    def _death_of(self, peer: PeerIdentity) -> str:
        return (
            f"its process {peer.pid} ended in the middle of (or without) this {self._kind}: it was killed, ran out of "
            "memory, or exited"
        )

    def _root_lost(self, phase: str, error: LineLost) -> FailureRecord:
        """The connection breaks a moment before the process is seen to end: look again for that moment."""
        root, give_up = self._communicator.root, time.monotonic() + _END_GRACE_S
        if self._communicator.here.sees(root):
            while time.monotonic() < give_up:
                if root.has_ended():
                    return FailureRecord.of_death(root, phase, self._death_of(root))
                time.sleep(LONGEST_PAUSE_S)
        return FailureRecord.of_death(root, phase, f"the connection to its store was lost ({error})")
