"""The ranks' own line: operations over a store that rank 0 serves for this library alone."""

from __future__ import annotations

import collections
import logging
import socket
import threading
import time
from typing import Any

from .base import Communicator
from .line import Line, LineLost, listen
from .outcome import LONGEST_PAUSE_S, left_counter, left_mark
from .peers import PeerIdentity, PeerWatch
from .rendezvous import LOOPBACK, Meeting, addresses_facing, meet, root_addresses
from .store_operation import StoreOperation

__all__ = ["StoreCommunicator"]

_log = logging.getLogger(__name__)

_LINGER_S = 5.0  # how long rank 0 keeps its store for ranks that still read from it


class StoreCommunicator(Communicator):
    """Ranks that meet in a store of their own. Thread-safe; each operation belongs to one thread at a time.

    When rank 0's process ends, its store ends with it: every later operation raises ``RankFailedError`` at once, until
    the job makes a new communicator.
    """

    def __init__(self, meeting: Meeting, world_size: int) -> None:
        self.here = meeting.here
        self.root = meeting.root
        self.watch = PeerWatch(meeting.here, meeting.neighbours)
        self._world_size = world_size
        self._addresses = meeting.addresses
        self._port = meeting.port
        self._local = meeting.local
        self._own_addresses: list[str] | None = None
        self._server = meeting.server
        self._lock = threading.Lock()
        self._idle_lines = [meeting.line]
        self._numbers: collections.Counter[str] = collections.Counter()
        self._left: collections.deque[str] = collections.deque(maxlen=64)
        self._open = 0

    @classmethod
    def connect(cls, store: Any, rank: int, world_size: int, *, deadline_s: float = 60.0) -> StoreCommunicator:
        """Meet the other ranks through any ``torch.distributed.Store`` that all of them share.

        Every rank calls it at about the same time. Raises ``DeadlineError`` naming who did not come.
        """
        here = PeerIdentity.of_this_process(rank)
        return cls(meet(store, here, world_size, deadline_s), world_size)

    @property
    def rank(self) -> int:
        return self.here.rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def operation(self, kind: str, *, deadline_s: float) -> StoreOperation:
        """Begin the next operation. ``deadline_s`` bounds each single wait of it. Never raises."""
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
            self._open += 1
        return StoreOperation(self, kind, f"{kind}/{number}", deadline_s)

    def close(self) -> None:
        """Give the store up. Rank 0 first waits, for a few seconds at most, until the others have left."""
        if self._server is not None:
            self._linger()
        self._drop()

    def close_if_over(self) -> bool:
        """``close`` unless an operation still runs here or, on rank 0, may run elsewhere; whether it was closed.

        Waits for nothing, so that it can be tried again and again.
        """
        with self._lock:
            if self._open:
                return False
            left = list(self._left) if self._server is not None else []
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
        with self._lock:
            self._idle_lines.clear()
            self._left.clear()
            self._server = None

    def key_count(self) -> int:
        """How many keys the store holds."""
        line = self.borrow_line()
        try:
            return line.key_count()
        finally:
            self.return_line(line)

    def borrow_line(self) -> Line:
        with self._lock:
            if self._idle_lines:
                return self._idle_lines.pop()
        return Line.connect(self._addresses, self._port)

    def return_line(self, line: Line) -> None:
        with self._lock:
            self._idle_lines.append(line)

    def listen(self) -> socket.socket:
        """A listening socket on a free port that every rank can reach."""
        return listen(LOOPBACK if self._local else "")

    def own_addresses(self) -> list[str]:
        """Where the other ranks reach this process, most likely first."""
        if self._local:
            return [LOOPBACK]
        if self._own_addresses is None:
            self._own_addresses = root_addresses() if self.rank == 0 else addresses_facing(self._addresses)
        return self._own_addresses

    def has_left(self, prefix: str, *, others_may_be_in: bool) -> None:
        """This rank is done with an operation."""
        with self._lock:
            self._open -= 1
            if others_may_be_in:
                self._left.append(prefix)

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

    def await_leavers(self, line: Line, prefix: str, give_up: float) -> None:
        """Wait until every other rank has left or its process has ended, at most until the clock says ``give_up``.

        For a rank that is still in the operation itself: until it leaves, the others' marks stay.
        """
        while not self._others_left(line, prefix) and time.monotonic() < give_up:
            time.sleep(LONGEST_PAUSE_S)

    def _is_over(self, line: Line, prefix: str) -> bool:
        # The last rank to leave sweeps marks and counter away.
        return not line.has(left_counter(prefix)) or self._others_left(line, prefix)

    def _others_left(self, line: Line, prefix: str) -> bool:
        ended = {peer.rank for peer in self.watch.ended()}
        others = (rank for rank in range(self._world_size) if rank != self.rank and rank not in ended)
        return all(line.has(left_mark(prefix, rank)) for rank in others)
