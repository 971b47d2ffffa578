"""The ranks' own lines: operations over stores that they serve for this library alone."""

from __future__ import annotations

import collections
import logging
import os
import socket
import threading
import time
from typing import Any

from .base import Communicator
from .connecting import listen
from .departure import RootMarks, all_left
from .keys import left_counter
from .line import Line, LineLost
from .meeting import GROUP_VARIABLE, LOOPBACK, Meeting, addresses_facing, root_addresses
from .outcome import LONGEST_PAUSE_S, OperationContext
from .peers import PeerIdentity, PeerWatch
from .relay import Relay
from .rendezvous import meet
from .store_operation import StoreOperation
from .tree import Tree

__all__ = ["StoreCommunicator"]

_log = logging.getLogger(__name__)

_LINGER_S = 5.0  # how long a rank keeps its store for those that still read from it
_CONNECT_S = 30.0


class StoreCommunicator(Communicator):
    """Ranks that meet in stores of their own. Thread-safe; each operation belongs to one thread at a time.

    When rank 0's process ends, its store ends with it: every later operation raises ``RankFailedError`` at once, until
    the job makes a new communicator.
    """

    relay_type = Relay

    def __init__(self, meeting: Meeting, world_size: int) -> None:
        self.here = meeting.here
        self.tree = meeting.tree
        self.children = meeting.tree.children(meeting.here.rank)
        self.watch = PeerWatch(meeting.here, meeting.neighbours)
        self.lines = meeting.lines
        self.root_marks = RootMarks(self.rank, self.tree)
        self._world_size = world_size
        self._local = meeting.local
        self._own_addresses: list[str] | None = None
        self._server = meeting.server
        self._relay = self.relay_type(self) if self.children and self.rank else None
        self._lock = threading.Lock()
        self._numbers: collections.Counter[str] = collections.Counter()
        self._left: collections.deque[str] = collections.deque(maxlen=64)
        self._open = 0

    @classmethod
    def connect(
        cls, store: Any, rank: int, world_size: int, *, deadline_s: float = 60.0, group_size: int | None = None
    ) -> StoreCommunicator:
        """Meet the other ranks through any ``torch.distributed.Store`` that all of them share.

        Every rank calls it at about the same time. Raises ``DeadlineError`` naming who did not come. Jobs of more than
        64 ranks talk in groups of consecutive ranks (``tree.py``); ``group_size``, or else an environment variable,
        both alike on every rank, set their size for any job.
        """
        if group_size is None and os.environ.get(GROUP_VARIABLE):
            group_size = int(os.environ[GROUP_VARIABLE])
        here, tree = PeerIdentity.of_this_process(rank), Tree.of(world_size, group_size)
        return cls(meet(store, here, world_size, deadline_s, tree), world_size)

    @property
    def rank(self) -> int:
        return self.here.rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def root(self) -> PeerIdentity:
        """Rank 0's process."""
        return self.lines.directory[0].server

    def operation(self, kind: str, *, deadline_s: float) -> StoreOperation:
        """Begin the next operation. ``deadline_s`` bounds each single wait of it. Never raises."""
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
        return self.begin(kind, f"{kind}/{number}", deadline_s)

    def begin(self, kind: str, prefix: str, deadline_s: float) -> StoreOperation:
        """Begin the operation whose keys begin with ``prefix``; no other ever had them."""
        with self._lock:
            self._open += 1
        context = OperationContext(self, kind, prefix, deadline_s)
        if self._relay is not None:
            self._relay.begin(context)
        return StoreOperation(self, context)

    def close(self) -> None:
        """Give the stores up. Who serves one first waits, for a few seconds at most, until the others have left."""
        if self._relay is not None:
            self._relay.end(_LINGER_S)
        elif self._server is not None:
            self._linger()
        self._drop()

    def close_if_over(self) -> bool:
        """``close`` unless an operation still runs here or, where a store is served, may run elsewhere; whether it was
        closed.

        Waits for nothing, so that it can be tried again and again.
        """
        with self._lock:
            if self._open:
                return False
            left = list(self._left) if self._server is not None else []
        if self._relay is not None:
            if not self._relay.is_idle:
                return False
            self._relay.end(0.0)
        try:
            line = self.borrow_line() if left else None
            if line is not None and not all(self._is_over(line, prefix) for prefix in left):
                self.return_line(line)
                return False
        except LineLost:
            _log.debug("the store ended before all ranks had left", exc_info=True)
        self._drop()
        return True

    def _drop(self) -> None:
        self.lines.drop()
        with self._lock:
            self._left.clear()
            self._server = None

    def key_count(self) -> int:
        """How many keys the store holds that this rank serves or, where it serves none, that of its parent."""
        line = self.lines.borrow(self.rank if self.children else self.tree.parent(self.rank), _CONNECT_S)
        try:
            return line.key_count()
        finally:
            self.return_line(line)

    def borrow_line(self) -> Line:
        """A line to the parent's store; on rank 0, to its own."""
        return self.lines.borrow(self.tree.parent(self.rank), _CONNECT_S)

    def return_line(self, line: Line) -> None:
        self.lines.give_back(line)

    def listen(self) -> socket.socket:
        """A listening socket on a free port that every rank can reach."""
        return listen(LOOPBACK if self._local else "")

    def own_addresses(self) -> list[str]:
        """Where the other ranks reach this process, most likely first."""
        if self._local:
            return [LOOPBACK]
        if self._own_addresses is None:
            root = self.lines.directory[0].addresses
            self._own_addresses = root_addresses() if self.rank == 0 else addresses_facing(root)
        return self._own_addresses

    def has_left(self, prefix: str, keys_above: list[str], *, others_may_be_in: bool) -> None:
        """This rank is done with an operation; a leader's relay learns what it made in rank 0's store."""
        with self._lock:
            self._open -= 1
            if others_may_be_in:
                self._left.append(prefix)
        if self._relay is not None:
            self._relay.leave(prefix, keys_above)

    def _linger(self) -> None:
        give_up = time.monotonic() + _LINGER_S
        try:
            line = self.borrow_line()
            for prefix in list(self._left):
                while not self._is_over(line, prefix):
                    if time.monotonic() > give_up:
                        return
                    time.sleep(LONGEST_PAUSE_S)
        except LineLost:
            _log.debug("the store ended before all ranks had left", exc_info=True)

    def _is_over(self, line: Line, prefix: str) -> bool:
        # The last rank to leave sweeps marks and counter away.
        return not line.has(left_counter(prefix)) or all_left(line, prefix, self.tree, self.watch)
