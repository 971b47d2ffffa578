"""How ranks learn of a failure, and how they agree on one: the first that reaches rank 0's store stands for all.

A rank whose parent is rank 0 puts its record there. One of a group leaves it in the leader's store, where the leader's
relay (``relay.py``) takes it up to rank 0, and the record that stands down to the group; where that takes too long,
the rank goes to rank 0's store by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from .failure import FailureRecord
from .keys import failure_key, left_mark, report_key
from .line import Line, LineLost
from .outcome import LATE_S, LONGEST_PAUSE_S, OperationContext
from .peers import PeerIdentity

__all__ = ["Reports", "death_of", "let_stand", "read_standing"]

_log = logging.getLogger(__name__)

# Connections of a process that was killed break before it is seen to end; on a busy host, long before.
_END_GRACE_S = 5.0
_RELAY_S = 2.0  # how long a rank waits for its leader's relay
_DIRECT_S = 5.0  # how long for rank 0's store, which it has not spoken to yet
# The first when a deadline has passed already; the second is ``LATE_S`` then.
_LATE_RELAY_S = 0.25
_GLANCE_S = 1.0  # for a look at another group's store


def let_stand(line: Line, prefix: str, record: FailureRecord, name: str) -> tuple[FailureRecord, list[str]]:
    """Put a failure into a store, its record under ``name``; the one that stands there, which is the first, and the
    keys that are to be swept."""
    # The records may be large and many; one short key decides which of them stands.
    key = failure_key(prefix)
    body = f"{key}/{name}"
    keys = line.put(body, record.pack())
    if line.put_first(key, body.encode()) == body.encode():
        return record, [key, *keys]
    line.delete(keys)
    standing, _keys = read_standing(line, key)
    return standing, []


def read_standing(line: Line, key: str) -> tuple[FailureRecord, list[str]]:
    """The record that ``key`` names, and its keys."""
    data, keys = line.read(line.read(key)[0].decode())
    return FailureRecord.unpack(data), keys


def death_of(peer: PeerIdentity, kind: str, phase: str) -> FailureRecord:
    """Of a process that was seen to have ended."""
    how = f"its process {peer.pid} ended in the middle of (or without) this {kind}: it was killed, ran out of memory, "
    return FailureRecord.of_death(peer, phase, how + "or exited")


class Reports:
    """The failures of one operation. For one thread at a time.

    Every method that reads may raise ``LineLost``, which ``raise_store_lost`` takes. ``keys`` are those that were made
    in the parent's store, ``keys_below`` those in the own.
    """

    def __init__(self, context: OperationContext) -> None:
        self._context, self._communicator = context, context.communicator
        self._tree = context.communicator.tree
        self._has_left: set[int] = set()
        self.keys: list[str] = []
        self.keys_below: list[str] = []

    def raise_failure(self) -> None:
        """Raise what this rank has failed with, or what any rank has reported."""
        outcome = self._context.outcome
        if outcome.error is not None:
            raise outcome.error
        line, key = self._context.above(), failure_key(self._context.prefix)
        if line.has(key):
            raise outcome.settle(read_standing(line, key)[0])

    def raise_death(self, phase: str, waited_for: Callable[[], list[int]]) -> None:
        """Only a rank that is waited for matters: what the others had to say has come, and may be all it takes."""
        ended = self._communicator.watch.ended()
        ranks = waited_for() if ended else []
        for peer in ended:
            if peer.rank in ranks and not self.has_left(peer.rank):
                self.raise_reported(death_of(peer, self._context.kind, phase))

    def has_left(self, rank: int) -> bool:
        """Whether that rank has left the operation; not where nobody can tell any more."""
        if rank in self._has_left:
            return True
        mark = left_mark(self._context.prefix, rank)
        home, here = self._tree.store_of_group(rank), self._communicator.rank
        if home == here:
            found = self._context.below().has(mark)
        elif home == self._tree.parent(here):
            found = self._context.above().has(mark)
        else:
            found = self._has_left_elsewhere(rank, home, mark)
        if found:
            self._has_left.add(rank)
        return found

    def _has_left_elsewhere(self, rank: int, home: int, mark: str) -> bool:
        line = self._context.above()
        if line.server == 0 == self._tree.parent(rank) and line.has(mark):
            return True
        try:
            return self._communicator.lines.borrow(home, _GLANCE_S).has(mark)
        except LineLost:
            _log.debug("rank %d's store has ended", home, exc_info=True)
            return False

    def report(self, record: FailureRecord, *, is_late: bool = False) -> FailureRecord:
        """Publish a failure; the one that stands, which is the first. Never raises. ``is_late``: a deadline has passed,
        and there is little time."""
        record = record if record.about else replace(record, about=self._context.about)
        if is_late:
            self._context.hurry(LATE_S)
        try:
            if self._tree.parent(self._communicator.rank) == 0:
                standing, keys = let_stand(self._context.above(), self._context.prefix, record, self._name())
                self.keys += keys
                return standing
            found = self._through_leader(record, _LATE_RELAY_S if is_late else _RELAY_S)
        except LineLost:
            _log.debug("could not report a failure in %s to a store that has ended", record.phase, exc_info=True)
            found = None
        if found is None and self._tree.parent(self._communicator.rank) != 0:
            found = self._to_root(record, LATE_S if is_late else _DIRECT_S)
        return found or self._among_us(record)

    def raise_reported(self, record: FailureRecord, *, is_late: bool = False) -> NoReturn:
        """Publish a failure and raise the one that stands."""
        raise self._context.outcome.settle(self.report(record, is_late=is_late))

    def raise_store_lost(self, phase: str, error: LineLost) -> NoReturn:
        """A store's end is its rank's failure. That of rank 0's cannot be reported to all; each sees it, or hears so
        from its leader."""
        lost = self._communicator.lines.directory[error.server].server
        record = self._silence_of(lost, phase) if error.is_silent else self._end_of(lost, phase, error)
        if error.server == 0:
            raise self._context.outcome.settle(self._among_us(record)) from error
        raise self._context.outcome.settle(self.report(record, is_late=error.is_silent)) from error

    def raise_peer_lost(self, phase: str, lost: PeerIdentity, how: str) -> NoReturn:
        """The connection to that rank broke. What it reported, or how its host saw it end, says why."""
        give_up = time.monotonic() + _END_GRACE_S
        can_see = self._communicator.here.sees(lost)
        while time.monotonic() < give_up:
            # It reports before it leaves, and leaves before it ends.
            has_left = self.has_left(lost.rank)
            self.raise_failure()
            if has_left:
                break
            if can_see and lost.has_ended():
                self.raise_reported(death_of(lost, self._context.kind, phase))
            time.sleep(LONGEST_PAUSE_S)
        self.raise_reported(FailureRecord.of_death(lost, phase, how))

    def _through_leader(self, record: FailureRecord, patience_s: float) -> FailureRecord | None:
        """Leave it for the leader's relay; what stands then, if that is heard in time."""
        line, prefix = self._context.above(), self._context.prefix
        line.be_patient(patience_s)
        key, body = report_key(prefix), f"{report_key(prefix)}/{self._name()}"
        keys = line.put(body, record.pack())
        if line.put_first(key, body.encode()) == body.encode():
            self.keys += [key, *keys]
        else:
            line.delete(keys)
        give_up = time.monotonic() + patience_s
        while not line.has(failure_key(prefix)):
            if time.monotonic() > give_up:
                return None
            time.sleep(LONGEST_PAUSE_S)
        return read_standing(line, failure_key(prefix))[0]

    def _to_root(self, record: FailureRecord, patience_s: float) -> FailureRecord | None:
        """Go to rank 0's store; what stands there."""
        try:
            root = self._communicator.lines.borrow(0, patience_s)
            # Its keys there are swept by the leader, where that still can.
            standing, _keys = let_stand(root, self._context.prefix, record, self._name())
        except LineLost:
            _log.debug("could not report a failure in %s: rank 0's store has ended", record.phase, exc_info=True)
            return None
        return self._among_us(standing)

    def _among_us(self, record: FailureRecord) -> FailureRecord:
        """Tell the group, when it may not hear it in another way: a leader its members, a member the others."""
        here = self._communicator.rank
        home = self._tree.store_of_group(here)
        if home == 0:
            return record
        try:
            line = self._context.line_to(home)
            line.be_patient(_LATE_RELAY_S)
            standing, keys = let_stand(line, self._context.prefix, record, self._name())
            made = self.keys_below if home == here else self.keys
            made += keys
        except LineLost:
            _log.debug("rank %d's store has ended", home, exc_info=True)
            return record
        return standing

    def _end_of(self, lost: PeerIdentity, phase: str, error: LineLost) -> FailureRecord:
        """The connection breaks a moment before the process is seen to end: look again for that moment."""
        give_up = time.monotonic() + _END_GRACE_S
        if self._communicator.here.sees(lost):
            while time.monotonic() < give_up:
                if lost.has_ended():
                    return death_of(lost, self._context.kind, phase)
                time.sleep(LONGEST_PAUSE_S)
        return FailureRecord.of_death(lost, phase, f"the connection to its store was lost ({error})")

    def _silence_of(self, lost: PeerIdentity, phase: str) -> FailureRecord:
        message = (
            f"{self._context.kind}: rank {lost.rank} on {lost.host} has given no answer for "
            f"{self._context.deadline_s:g} s to rank(s) that waited for it in {phase}: its process is stopped, or its "
            "host out of reach. Look at what it was doing then, or give a longer deadline."
        )
        return FailureRecord.of_deadline(message, phase, self._communicator.here)

    def _name(self) -> str:
        return f"{self._communicator.rank}.{threading.get_native_id()}.{time.monotonic_ns()}"
