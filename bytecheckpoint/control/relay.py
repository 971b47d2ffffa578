"""On a leader: what passes between its group's store and rank 0's while the leader itself is busy.

For each operation from its beginning here until the whole group has left: a failure that stands with rank 0 goes down
to the group, one that a member reports goes up, and when all of the group have left (or ended), the relay sweeps the
group's store and tells rank 0 so. It runs in one thread of an executor for as long as there is such an operation.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..at_exit import before_exit
from .departure import sweep
from .failure import FailureRecord
from .keys import failure_key, left_counter, left_mark, report_key
from .line import Line, LineLost
from .outcome import OperationContext
from .reports import death_of, let_stand, read_standing

if TYPE_CHECKING:
    from .store import StoreCommunicator

__all__ = ["Relay"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
_PAUSE_PER_CHILD_S = 0.2e-3  # so that rank 0's store is not kept busy by looks
_FIRST_PAUSE_S = 0.002  # once the leader has left, and its group does
_LEAVING_S = 1.0  # for so long; after it, somebody is late or gone
_PATIENCE_S = 5.0  # with rank 0's store; then another connection is tried
_AT_EXIT_S = 5.0
_MOST_LEFT_OVER = 64  # operations that the leader has left and members have not

_relays: weakref.WeakSet[Relay] = weakref.WeakSet()


@dataclass
class _Relayed:
    context: OperationContext
    is_open: bool = True  # the leader is in it
    is_told: bool = False  # the group knows of a failure
    left_at: float = 0.0
    keys_above: set[str] = field(default_factory=set)
    keys_below: set[str] = field(default_factory=set)


class Relay:
    """Thread-safe. Its methods return at once, apart from ``end``."""

    def __init__(self, communicator: StoreCommunicator) -> None:
        self._communicator, self._tree = communicator, communicator.tree
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._relayed: dict[str, _Relayed] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._is_ending = False
        self._lines: dict[int, Line] = {}  # of the thread alone
        _relays.add(self)

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._relayed

    def begin(self, context: OperationContext) -> None:
        """An operation has begun here."""
        with self._lock:
            self._relayed[context.prefix] = _Relayed(context)
            if self._running is None and not self._is_ending:
                self._start()

    def leave(self, prefix: str, keys_above: list[str]) -> None:
        """The leader has left it, and made these keys in rank 0's store."""
        with self._lock:
            one = self._relayed.get(prefix)
            if one is None:
                return
            one.is_open, one.left_at = False, time.monotonic()
            one.keys_above.update(keys_above)
            left_over = [key for key, other in self._relayed.items() if not other.is_open]
            for key in left_over[:-_MOST_LEFT_OVER]:
                del self._relayed[key]
        self._changed.set()

    def end(self, timeout_s: float) -> None:
        """Wait until the group has left what the leader has left, at most so long, and then stop."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self._running is not None and self._has_left_overs():
            time.sleep(_FIRST_PAUSE_S)
        with self._lock:
            self._is_ending = True
            executor, self._executor = self._executor, None
        self._changed.set()
        if executor is not None:
            executor.shutdown()
        self._lines.clear()

    def _has_left_overs(self) -> bool:
        with self._lock:
            return any(not one.is_open for one in self._relayed.values())

    def _start(self) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "bytecheckpoint-relay")
        self._running = self._executor.submit(self._run)

    def _run(self) -> None:
        pause_s = max(_LOOK_EVERY_S, self._tree.child_count(0) * _PAUSE_PER_CHILD_S)
        while True:
            self._changed.clear()
            with self._lock:
                if self._is_ending or not self._relayed:
                    self._running = None
                    return
            self._changed.wait(_FIRST_PAUSE_S if self.look() else pause_s)

    def look(self) -> bool:
        """Do for each operation what there is to do now; whether more is expected at once."""
        with self._lock:
            relayed = list(self._relayed.values())
        for one in relayed:
            try:
                self._attend(one)
            except Exception:  # noqa: BLE001 - whatever happens to one operation, the others need their relay
                _log.exception("relaying %s failed", one.context.prefix)
                self._forget(one)
        return any(not one.is_open and time.monotonic() < one.left_at + _LEAVING_S for one in relayed)

    def _attend(self, one: _Relayed) -> None:
        below = self._line(self._communicator.rank)
        for step in (self._carry, self._conclude):
            try:
                step(one, below)
            except LineLost as error:
                if error.server != 0:
                    raise
                self._root_is_lost(one, below, error)

    def _carry(self, one: _Relayed, below: Line) -> None:
        """Bring a failure, where there is one, to those who do not know of it."""
        prefix, name = one.context.prefix, f"{self._communicator.rank}.relay"
        if one.is_told:
            return
        if below.has(failure_key(prefix)):
            # From one who could not wait for this relay, or saw rank 0's end.
            one.is_told = True
            let_stand(self._line(0), prefix, read_standing(below, failure_key(prefix))[0], name)
        elif self._line(0).has(failure_key(prefix)):
            self._bring_down(one, below, read_standing(self._line(0), failure_key(prefix))[0])
        elif below.has(report_key(prefix)):
            record = read_standing(below, report_key(prefix))[0]
            self._bring_down(one, below, let_stand(self._line(0), prefix, record, name)[0])
        else:
            return
        # Of whoever put it there: not all who did can tell rank 0 so.
        one.keys_above.update(read_standing(self._line(0), failure_key(prefix))[1])

    def _bring_down(self, one: _Relayed, below: Line, record: FailureRecord) -> None:
        one.is_told = True
        one.keys_below.update(let_stand(below, one.context.prefix, record, "standing")[1])

    def _root_is_lost(self, one: _Relayed, below: Line, error: LineLost) -> None:
        """Where its process is seen to have ended, the group need not wait for its leader to say so."""
        root = self._communicator.root
        if one.is_told:
            _log.debug("rank 0's store has ended before the group had left", exc_info=error)
        elif not error.is_silent and self._communicator.here.sees(root) and root.has_ended():
            self._bring_down(one, below, death_of(root, one.context.kind, one.context.phase))

    def _group_has_left(self, one: _Relayed, below: Line) -> bool:
        branch, prefix = self._tree.branch(self._communicator.rank), one.context.prefix
        counted = below.add(left_counter(prefix), 0)
        if counted >= len(branch):
            return True
        ended = {peer.rank for peer in self._communicator.watch.ended()}
        if not ended and not one.is_told:
            return False
        marked = [rank for rank in branch if below.has(left_mark(prefix, rank))]
        for rank in set(branch) - set(marked) - ended:
            # One that gave this store up has told rank 0 that it has left.
            if not one.is_told or not self._line(0).has(left_mark(prefix, rank)):
                return False
            one.keys_above.add(left_mark(prefix, rank))
        # A rank leaves its mark, and then it counts: a counter that is swept in between would come back.
        return counted >= len(set(marked) - ended)

    def _conclude(self, one: _Relayed, below: Line) -> None:
        """Where all of the group have left, sweep, and tell rank 0 so."""
        if one.is_open or not self._group_has_left(one, below):
            return
        prefix, here = one.context.prefix, self._communicator.rank
        present = [rank for rank in self._tree.branch(here) if below.has(left_mark(prefix, rank))]
        sweep(below, prefix, present)
        below.delete(sorted(one.keys_below))
        self._forget(one)
        self._communicator.root_marks.leave(lambda: self._line(0), prefix, one.keys_above)

    def _line(self, server: int) -> Line:
        """The relay's own, so that it takes none from operations."""
        if server not in self._lines or self._lines[server].is_lost:
            self._lines[server] = self._communicator.lines.connect(server, _PATIENCE_S)
        return self._lines[server]

    def _forget(self, one: _Relayed) -> None:
        with self._lock:
            self._relayed.pop(one.context.prefix, None)


def _end_all() -> None:
    """Executors' threads are joined at exit: none may go on for an operation that nobody ends."""
    for relay in list(_relays):
        relay.end(_AT_EXIT_S)


# Registered before any save that still goes on at exit, so that it runs after their end.
before_exit(_end_all)
