"""Coordinate saves among ranks: all ranks save the same step, leave together, and raise the same failure.

A decision that depends on a clock, a signal or a request is made by rank 0 alone, from the status of every rank. Ranks
exchange it in a *coordination round*: one small message per rank to rank 0, one response. Rounds take place whenever a
save is due by its step, and every few seconds in between; in all other iterations of the training loop, ranks exchange
nothing. When an exception has ended training, they agree on one last save: which ranks take part, and what is recorded
of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import msgpack
import torch

from ..checkpointer import Session
from ..control.base import Operation
from ..control.failure import message_of, shorten
from ..errors import (
    ControlError,
    DeadlineError,
    DisagreementError,
    RootInUseError,
    StateError,
    StorageError,
    without_userinfo,
)
from ..runtime.messages import describe_disagreement
from ..saving.handle import SaveHandle, failure_of
from .options import Cadence, Preemption
from .signals import SignalWatch

_MAX_MESSAGE = 2000  # characters
_POLL_S = 0.02
_MAX_TURNS = 10_000  # between two rounds, however short the turns seem
_RETRY_S = 60.0  # from a continuous save that failed to the next one
EARLIER_SAVES = "earlier saves"

_log = logging.getLogger(__name__)


class CoordinationRounds:
    """Opens coordination rounds, in which every rank waits at most ``deadline_s`` for the others."""

    def __init__(self, session: Session, deadline_s: float) -> None:
        self._session, self._deadline_s = session, deadline_s

    def begin(self) -> Operation:
        """Begin a round. The caller closes it."""
        return self._session.operation("manager", self._deadline_s)

    @contextmanager
    def round(self, followed_by: str = "") -> Iterator[Operation]:
        """Run one round. ``followed_by`` is the kind of the operation that continues it: "save" or "load"."""
        with self.begin() as op, self.reporting(op, followed_by) if followed_by else nullcontext():
            yield op

    @contextmanager
    def reporting(self, op: Operation, followed_by: str) -> Iterator[None]:
        """Report a failure of the block on this rank also to the next operation of kind ``followed_by`` after ``op``.

        Other ranks, for which the block succeeded, may already wait in that operation.
        """
        try:
            yield
        except BaseException as error:
            op.close()
            with op.follow(followed_by, deadline_s=self._deadline_s) as next_op:
                next_op.fail("coordinate", error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Report the error that ended training on this rank. The other ranks raise it in their next round."""
        with self.begin() as op:
            op.fail("training", error)


class SavesInFlight:
    """This rank's unfinished saves, oldest first; at most ``limit`` run at a time. For the training thread.

    Attributes:
        guard: Raises ``RootInUseError`` if this job has lost the root. A save whose files another job has removed for
            that reason may fail before this job has noticed it.
    """

    def __init__(self) -> None:
        self.guard: Callable[[], None] = lambda: None
        self.limit = 1
        self._saves: deque[SaveHandle] = deque()

    def add(self, handle: SaveHandle) -> None:
        self._saves.append(handle)

    def is_full(self) -> bool:
        return sum(not handle.done() for handle in self._saves) >= self.limit

    def is_any_running(self) -> bool:
        return any(not handle.done() for handle in tuple(self._saves))

    def collect(self, op: Operation) -> bool:
        """Forget saves that ended on this rank, and return whether one of them failed.

        The next save warns of it, and ``CheckpointManager.close`` raises it, unless a later one is committed. If this
        job has lost the root, every rank raises ``RootInUseError``.
        """
        has_failed = False
        with op.phase(EARLIER_SAVES):
            while self._saves and self._saves[0].done():
                error = failure_of(self._saves.popleft())
                has_failed |= error is not None
                if isinstance(error, StorageError):
                    self._raise_if_lost(error)
        return has_failed

    def _raise_if_lost(self, error: StorageError) -> None:
        try:
            self.guard()
        except RootInUseError as lost:
            raise lost from error
        except StorageError:
            return  # the store fails

    def wait_for_room(self, op: Operation) -> None:
        """Wait until one more save may begin on all ranks. Raises like ``collect``."""
        while self.is_full():
            failure_of(self._saves[0])
            self.collect(op)
        op.barrier(EARLIER_SAVES)

    def wait_committed(self) -> None:
        """Wait until it is known what this rank's saves have committed."""
        for handle in self._saves:
            failure_of(handle)

    def finish(self, op: Operation) -> bool:
        """Wait for all saves of this rank. Returns and raises like ``collect``."""
        self.wait_committed()
        return self.collect(op)

    def drain(self) -> None:
        """Wait for all saves of this rank and log failures. Exchanges nothing with other ranks. Never raises."""
        while self._saves:
            handle = self._saves[0]
            error = failure_of(handle)  # an interrupt leaves it to the next call
            self._saves.popleft()
            if error is not None:
                _log.error("saving %s failed: %s", without_userinfo(handle.url), error)


class RoundTimer:
    """Converts an interval in seconds to a number of turns, from the turns that recent rounds were apart."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._turn, self._time = 0, 0.0

    def turns_to_next(self, turn: int, now: float) -> int:
        """Return how many turns after ``turn`` the next round is due; at least one."""
        turns, seconds = turn - self._turn, now - self._time
        is_first, self._turn, self._time = self._turn == 0, turn, now
        if is_first or turns < 1:
            return 1
        if seconds * _MAX_TURNS < turns * self._interval_s:
            return _MAX_TURNS
        return max(1, int(self._interval_s * turns / seconds))


class _RankStatus(NamedTuple):
    """What one rank sends to rank 0. ``turn`` numbers the calls of ``save``; the signal is 0 if there was none."""

    step: int
    turn: int
    is_due: bool  # by its step
    is_forced: bool
    is_requested: bool  # by request_save or a signal
    is_busy: bool  # with as many earlier saves as may run
    is_saving: bool
    preemption_signal: int
    grace_s: float  # left, if there was a preemption signal
    milestone: str

    def facts(self) -> dict[str, str]:
        """The values that must be the same on all ranks."""
        return {
            "step": str(self.step),
            "call of save": str(self.turn),
            "a save is due": str(self.is_due or self.is_forced),
            "milestone": self.milestone,
        }


class Decision(NamedTuple):
    """Rank 0's response: whether to save, and the preemption signal (or 0) with the shortest grace period left.

    ``metrics`` and ``milestone`` are those of rank 0.
    """

    save: bool
    preemption_signal: int
    grace_s: float
    next_turn: int
    metrics: dict[str, float]
    milestone: str


class SaveCall(NamedTuple):
    """One call of ``save`` on this rank."""

    step: int
    is_due: bool  # by its step
    is_forced: bool
    metrics: dict[str, float]
    milestone: str


class SaveCoordinator:
    """Decides with the other ranks whether to save and whether to leave.

    ``request`` may be called from any thread, everything else from the training thread.
    """

    def __init__(self, cadence: Cadence, preemption: Preemption, *, skip_when_busy: bool) -> None:
        self._cadence, self._preemption = cadence, preemption
        self._skip_when_busy = skip_when_busy
        self.begin(SignalWatch(()), 0.0)
        self._turn, self._next_turn = 0, 1
        self._last_save = time.monotonic()
        self._last_step: int | None = None  # that was saved, or is being saved
        self._retry_time = 0.0  # of continuous saves
        self._is_requested = False

    def begin(self, signals: SignalWatch, interval_s: float) -> None:
        """Decide by these signals, in rounds that are about so many seconds apart."""
        self._signals, self._timer = signals, RoundTimer(interval_s)

    def request(self) -> None:
        """Request a save in the next round."""
        self._is_requested = True

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by its step; the same answer on every rank."""
        return self._cadence.every_steps is not None and step % self._cadence.every_steps == 0

    def begin_turn(self, *, is_due: bool) -> bool:
        """Begin a turn and return whether it has a round; the same answer on every rank."""
        self._turn += 1
        return is_due or self._turn >= self._next_turn

    def decide(self, op: Operation, call: SaveCall, *, is_busy: bool, is_saving: bool, milestone: str) -> Decision:
        """Exchange status and decision. Every rank raises ``DisagreementError`` if steps or turns differ.

        ``milestone`` is the name under which a save is stored.
        """
        packed = op.gather("coordinate", msgpack.packb(self._status(call, is_busy=is_busy, is_saving=is_saving)))
        response = None
        if packed is not None:
            statuses = [_RankStatus(*msgpack.unpackb(one)) for one in packed]
            with op.phase("coordinate"):
                differences = describe_disagreement("CheckpointManager.save", [one.facts() for one in statuses])
                if differences:
                    raise DisagreementError(differences)
            response = msgpack.packb(self._decide(statuses, call.metrics)._replace(milestone=milestone))
        decision = Decision(*msgpack.unpackb(op.broadcast("decision", response)))
        self._next_turn = decision.next_turn
        return decision

    def save_began(self, step: int) -> None:
        """``step`` is being saved; this fulfils all requests so far."""
        self._last_save, self._last_step = time.monotonic(), step
        self._is_requested = False
        for number in self._cadence.signals:
            self._signals.received.pop(number, None)

    def save_failed(self) -> None:
        """A save failed; the same step may be saved again."""
        self._last_step = None
        self._retry_time = time.monotonic() + _RETRY_S  # a store that is down would make each step copy the state

    def _status(self, call: SaveCall, *, is_busy: bool, is_saving: bool) -> _RankStatus:
        received = self._signals.received
        number = next((number for number in self._preemption.signals if number in received), 0)
        grace_s = self._preemption.grace_s - (time.monotonic() - received[number]) if number else 0.0
        is_requested = self._is_requested or any(number in received for number in self._cadence.signals)
        due = (call.is_due, call.is_forced, is_requested)
        return _RankStatus(call.step, self._turn, *due, is_busy, is_saving, number, grace_s, call.milestone)

    def _decide(self, statuses: Sequence[_RankStatus], metrics: dict[str, float]) -> Decision:
        now, step, turn = time.monotonic(), statuses[0].step, statuses[0].turn
        leaving = [one for one in statuses if one.preemption_signal]
        minutes = self._cadence.every_minutes
        save = (
            bool(leaving)
            or statuses[0].is_due
            or any(one.is_requested for one in statuses)
            or (minutes is not None and now - self._last_save >= 60 * minutes)
            or (self._cadence.continuous and now >= self._retry_time and not any(one.is_saving for one in statuses))
        )
        if step == self._last_step:
            save = False
        if statuses[0].is_forced:
            save = True
        elif save and not leaving and self._skip_when_busy and any(one.is_busy for one in statuses):
            _log.info("step %d is not saved: earlier saves are still in flight", step)
            save = False
        grace_s = min((one.grace_s for one in leaving), default=0.0)
        number = leaving[0].preemption_signal if leaving else 0
        next_turn = turn + self._timer.turns_to_next(turn, now)
        return Decision(save, number, grace_s, next_turn, metrics if save else {}, milestone="")


class _LeavingRank(NamedTuple):
    """What one rank sends to rank 0. ``step`` is the last one for which it called ``save``; -1 if there is none."""

    step: int
    error_type: str
    message: str
    is_consequence: bool  # of a failure on another rank


def agree_on_last_save(op: Operation, step: int | None, error: BaseException, deadline_s: float) -> dict[str, Any]:
    """Wait until all ranks have joined, and return what the checkpoint records of the exception.

    Args:
        op: An operation that every rank enters when it leaves the training loop.
        step: The last step that this rank completed.
        error: The exception that made this rank leave.
        deadline_s: How long to wait for the device.

    Returns:
        A map of ``type``, ``message``, ``rank`` and ``steps`` (the lowest and the highest of the ranks), the same on
        every rank.

    Raises:
        StateError: Some rank has not completed a step, so its state is not worth saving.
        ControlError: Some rank did not join, or its device is busy.
    """
    with op.phase("device"):
        _wait_for_device(deadline_s)
    is_consequence = isinstance(error, ControlError)
    message = shorten(message_of(error), _MAX_MESSAGE)
    report = _LeavingRank(-1 if step is None else step, type(error).__name__, message, is_consequence)
    packed = op.gather("join", msgpack.packb(report))
    response = None
    if packed is not None:
        with op.phase("decide"):
            response = msgpack.packb(_cause_of([_LeavingRank(*msgpack.unpackb(one)) for one in packed]))
    decision: dict[str, Any] = msgpack.unpackb(op.broadcast("decision", response))
    return decision


def _cause_of(reports: list[_LeavingRank]) -> dict[str, Any]:
    steps = [one.step for one in reports]
    if min(steps) < 0:
        raise StateError(f"rank {steps.index(min(steps))} has not completed a step since it started or resumed")
    rank = min(range(len(reports)), key=lambda number: (reports[number].is_consequence, number))
    cause = reports[rank]
    return {"type": cause.error_type, "message": cause.message, "rank": rank, "steps": [min(steps), max(steps)]}


def _wait_for_device(deadline_s: float) -> None:
    """Wait for the work that was queued before. A collective that another rank never entered would block a copy."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    give_up, never = time.monotonic() + deadline_s, threading.Event()
    stream = torch.cuda.current_stream()
    while not stream.query():
        if time.monotonic() > give_up:
            raise DeadlineError(
                f"{stream.device} is still busy after {deadline_s:g} s, probably in a collective that other ranks left"
            )
        never.wait(_POLL_S)
