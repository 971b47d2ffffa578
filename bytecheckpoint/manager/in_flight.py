"""The saves of one rank that are under way, and the ranks' common word on what became of them."""

from __future__ import annotations

import logging
from collections import deque

from ..control.base import Operation
from ..handle import SaveHandle

__all__ = ["SavesInFlight"]

_PHASE = "earlier saves"

_log = logging.getLogger(__name__)


class SavesInFlight:
    """In the order in which they began; at most ``limit`` run at a time. For the thread that trains.

    A save may have ended on one rank and not yet on another, so whether one failed is settled in an operation: all
    ranks raise its cause, or none does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._saves: deque[SaveHandle] = deque()

    def add(self, handle: SaveHandle) -> None:
        self._saves.append(handle)

    def is_full(self) -> bool:
        return sum(not handle.done() for handle in self._saves) >= self._limit

    def settle(self, op: Operation) -> None:
        """Forget what has ended on this rank. If a save failed on any rank, raise that on this one, by the time of the
        operation's next exchange. ``drain`` then, on every rank: its part of the failure is not to be raised again."""
        with op.phase(_PHASE):
            while self._saves and self._saves[0].done():
                self._saves.popleft().result()

    def make_room(self, op: Operation) -> None:
        """Wait until one more may begin, on all ranks. Raises as ``settle``."""
        while self.is_full():
            self._saves[0].exception()
            self.settle(op)
        op.barrier(_PHASE)

    def finish(self, op: Operation) -> None:
        """Wait for all, on all ranks. Raises as ``settle``."""
        for handle in self._saves:
            handle.exception()
        self.settle(op)
        op.barrier(_PHASE)

    def drain(self) -> None:
        """Wait for all and log what failed. Asks nothing of other ranks. Never raises."""
        while self._saves:
            handle = self._saves.popleft()
            error = handle.exception()
            if error is not None:
                _log.error("%s was not saved: %s", handle.url, error)
