"""What the ranks settle at a turn of the training loop: whether all save now, whether all leave, when to meet again.

A decision that clocks or signals have a part in is rank 0's alone, made from what every rank tells, so that all ranks
save the same step or none does. Two small messages a rank; the ranks meet every few seconds, and where a save is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from ..control.agreement import describe_disagreement
from ..control.base import Operation
from ..errors import DisagreementError
from .cadence import Cadence, Pace
from .signals import SignalWatch

__all__ = ["Agenda", "Verdict"]

_log = logging.getLogger(__name__)


class _Told(NamedTuple):
    """One rank's word. ``turn`` counts calls of ``save``. ``is_due`` by its step, or forced; ``wants`` a save for
    another reason; ``is_busy``: earlier saves are under way; ``leaving``: the signal that asks this rank to leave, or
    0, with ``grace_s`` left."""

    step: int
    turn: int
    is_due: bool
    wants: bool
    is_busy: bool
    leaving: int
    grace_s: float

    def facts(self) -> dict[str, str]:
        """What all ranks must have alike."""
        return {"step": str(self.step), "call of save": str(self.turn), "a save is due": str(self.is_due)}


class Verdict(NamedTuple):
    """Rank 0's word. ``leaving``: a signal that any rank got, or 0, with the shortest grace of those that did."""

    save: bool
    leaving: int
    grace_s: float
    next_turn: int


class Agenda:
    """When the ranks meet, about every ``meet_every_s``, and what they decide. ``request`` is for any thread, the rest
    for the one that trains."""

    def __init__(
        self,
        cadence: Cadence,
        signals: SignalWatch,
        *,
        preempt_signals: Sequence[int],
        save_signals: Sequence[int],
        grace_s: float,
        skips_when_busy: bool,
        meet_every_s: float,
    ) -> None:
        self._cadence, self._signals, self._pace = cadence, signals, Pace(meet_every_s)
        self._preempt_signals, self._save_signals = preempt_signals, save_signals
        self._grace_s, self._skips_when_busy = grace_s, skips_when_busy
        self._turn, self._next_turn = 0, 1
        self._saved: int | None = None  # the step that was saved last, or is being saved
        self._is_requested = False

    def request(self) -> None:
        self._is_requested = True

    def is_due(self, step: int) -> bool:
        """The same answer on every rank."""
        return self._cadence.is_due_at(step)

    def must_meet(self, is_due: bool) -> bool:
        """Begin a turn. Whether the ranks meet in it; the same answer on every rank."""
        self._turn += 1
        return is_due or self._turn >= self._next_turn

    def meet(self, op: Operation, step: int, is_due: bool, is_busy: bool) -> Verdict:
        """Tell, and hear what rank 0 decides. Every rank raises ``DisagreementError`` where steps or turns differ."""
        heard = op.gather("meet", msgpack.packb(self._own_word(step, is_due, is_busy)))
        answer = None
        if heard is not None:
            everyone = [_Told(*msgpack.unpackb(one)) for one in heard]
            with op.phase("meet"):
                differing = describe_disagreement("CheckpointManager.save", [one.facts() for one in everyone])
                if differing:
                    raise DisagreementError(differing)
            answer = msgpack.packb(self._decide(everyone))
        verdict = Verdict(*msgpack.unpackb(op.broadcast("verdict", answer)))
        self._next_turn = verdict.next_turn
        return verdict

    def began(self, step: int) -> None:
        """``step`` is being saved: whatever was asked for by now is answered."""
        self._cadence.began(time.monotonic())
        self._saved = step
        self._is_requested = False
        for number in self._save_signals:
            self._signals.came.pop(number, None)

    def failed(self) -> None:
        """Some save failed: the same step may be saved once more."""
        self._saved = None

    def _own_word(self, step: int, is_due: bool, is_busy: bool) -> _Told:
        came = self._signals.came
        leaving = next((number for number in self._preempt_signals if number in came), 0)
        grace_s = self._grace_s - (time.monotonic() - came[leaving]) if leaving else 0.0
        wants = self._is_requested or any(number in came for number in self._save_signals)
        return _Told(step, self._turn, is_due, wants, is_busy, leaving, grace_s)

    def _decide(self, everyone: Sequence[_Told]) -> Verdict:
        now, step, turn = time.monotonic(), everyone[0].step, everyone[0].turn
        leaving = [one for one in everyone if one.leaving]
        save = bool(leaving) or everyone[0].is_due or any(one.wants for one in everyone) or self._cadence.is_due_by(now)
        if step == self._saved:
            save = False
        if save and not leaving and self._skips_when_busy and any(one.is_busy for one in everyone):
            _log.info("step %d is not saved: earlier saves are still under way", step)
            save = False
        grace_s = min((one.grace_s for one in leaving), default=0.0)
        signal = leaving[0].leaving if leaving else 0
        return Verdict(save, signal, grace_s, turn + self._pace.turns_to_next(turn, now))
