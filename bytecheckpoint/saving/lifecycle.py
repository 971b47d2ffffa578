"""The states of one save on one rank, and the transitions between them.

The caller's thread prepares a save and the background thread completes it. Either thread may fail, and the caller may
be interrupted at any moment. The lifecycle decides which thread owns the save and therefore cleans up:

    PREPARING --> QUEUED --> MERGING --> WRITING --> COMMITTED
        |           |           |           |
        +-----------+-----------+-----------+--> FAILING --> FAILED

The caller owns the save while it is ``PREPARING`` or ``QUEUED``. The background thread owns it from ``MERGING`` on. A
thread that moves the save to ``FAILING`` cleans up and then moves it to ``FAILED``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, TypeVar

from ..errors import SavePendingError, UsageError
from ..runtime.waiting import Waiters

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class SaveState(Enum):
    """A state of a save."""

    PREPARING = auto()  # the caller plans and copies
    QUEUED = auto()  # the caller has handed it over; the background thread has not started
    MERGING = auto()  # the background thread may still read the caller's tensors
    WRITING = auto()  # only staged bytes are needed
    FAILING = auto()  # one thread cleans up
    COMMITTED = auto()
    FAILED = auto()

    @property
    def is_final(self) -> bool:
        """Whether no transition leaves this state."""
        return not _TRANSITIONS[self]


_TRANSITIONS = {
    SaveState.PREPARING: {SaveState.QUEUED, SaveState.FAILING},
    SaveState.QUEUED: {SaveState.MERGING, SaveState.FAILING},
    SaveState.MERGING: {SaveState.WRITING, SaveState.FAILING},
    SaveState.WRITING: {SaveState.COMMITTED, SaveState.FAILING},
    SaveState.FAILING: {SaveState.FAILED},
    SaveState.COMMITTED: set(),
    SaveState.FAILED: set(),
}


class InvalidTransition(AssertionError):
    """A thread tried to move a save along an edge that does not exist: a bug in this library."""


class SaveLifecycle(Generic[ResultT]):
    """The state of one save. Thread-safe; ctrl-C may interrupt a waiting thread at any moment."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._state = SaveState.PREPARING
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self._waiters = Waiters()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def state(self) -> SaveState:
        """The current state."""
        return self._state

    # -- transitions ---------------------------------------------------------------------------------------------

    def queue(self) -> None:
        """The caller hands the save over to the background thread."""
        self._move(SaveState.QUEUED)

    def start(self) -> bool:
        """The background thread takes the save over; False if the caller has withdrawn it."""
        return self._move(SaveState.MERGING, unless={SaveState.FAILING, SaveState.FAILED})

    def finish_merge(self) -> None:
        """The merge stage needs no tensor of the caller any more."""
        self._move(SaveState.WRITING)

    def withdraw(self, error: BaseException) -> bool:
        """The caller stops the save and cleans up; False if the background thread owns the save already."""
        owned = {SaveState.MERGING, SaveState.WRITING, SaveState.FAILING}
        return self._move(SaveState.FAILING, unless=owned | {s for s in SaveState if s.is_final}, error=error)

    def fail(self, error: BaseException) -> None:
        """The background thread stops the save and cleans up. ``result`` raises ``error``."""
        self._move(SaveState.FAILING, error=error)

    def end_failed(self) -> None:
        """The thread that failed has cleaned up."""
        self._move(SaveState.FAILED)

    def commit(self, result: ResultT) -> None:
        """The checkpoint exists."""
        self._move(SaveState.COMMITTED, result=result)

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait_merged(self) -> None:
        """Return when the merge stage needs no tensor of the caller any more. Raises what the save failed with."""
        self._wait(lambda state: state not in (SaveState.PREPARING, SaveState.QUEUED, SaveState.MERGING))
        error = self._error
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # The traceback refers to this frame: avoid a reference cycle.

    def wait_final(self, timeout_s: float | None = None) -> bool:
        """Wait until the save has ended; False if that took longer than ``timeout_s``."""
        return self._wait(lambda state: state.is_final, timeout_s)

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait until the save has ended.

        Raises:
            SavePendingError: The save had not ended after ``timeout_s`` seconds.
            BaseException: What the save failed with.
        """
        error = self.exception(timeout_s)
        if error is None:
            assert self._result is not None
            return self._result
        try:
            raise error
        finally:
            del error, self  # The traceback refers to this frame: avoid a reference cycle.

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What ``result`` raises; None if the save was committed. Waits like ``result``."""
        if not self.wait_final(timeout_s):
            raise SavePendingError(f"the save has not ended after {timeout_s} s and continues in the background")
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the save has ended, on the thread that ends it; at once if it has ended already."""
        self.check_is_own()
        with self._lock:
            if not self._state.is_final:
                self._callbacks.append(callback)
                return
        _call(callback)

    def check_is_own(self) -> None:
        """Raise ``UsageError`` in a forked child, which has none of the threads that would end the save."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"process {self._pid} made this save, and only it can wait for the end; this process was forked from it"
            )

    # -- internals -----------------------------------------------------------------------------------------------

    def _move(
        self,
        to: SaveState,
        *,
        unless: set[SaveState] | None = None,
        result: ResultT | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """Move to ``to`` and wake all waiters; with ``unless``, stay in one of these states and return False."""
        with self._lock:
            if unless is not None and self._state in unless:
                return False
            if to not in _TRANSITIONS[self._state]:
                raise InvalidTransition(f"a save cannot go from {self._state.name} to {to.name}")
            if error is not None:
                self._error = error
            self._result = result
            self._state = to
            callbacks: list[Callable[[], None]] = []
            if to.is_final:
                callbacks, self._callbacks = self._callbacks, []
        self._waiters.wake()
        for callback in callbacks:
            _call(callback)
        return True

    def _wait(self, reached: Callable[[SaveState], bool], timeout_s: float | None = None) -> bool:
        if reached(self._state):
            return True
        self.check_is_own()
        return self._waiters.wait_until(lambda: reached(self._state), timeout_s)


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - foreign code must not end the background thread
        _log.exception("a done callback of a save failed")
