"""A rank's waits in the exchanges of an operation, and the notes by which a deadline's message names the true culprit.

Waits are polls: between two looks at the awaited key a rank looks whether somebody failed, whether a process on its
host has ended, and at the clock. Who waits for its children writes down for whom, now and then: for them in its own
store, and for its own parent in the parent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgpack

from .agreement import format_ranks
from .failure import FailureRecord
from .keys import note_key
from .line import Line
from .outcome import LATE_S, LONGEST_PAUSE_S, OperationContext
from .reports import Reports

__all__ = ["Waiting"]

_FIRST_PAUSE_S = 0.0003
_PAUSE_PER_RANK_S = 25e-6  # more ranks at one store look less often, so that it is not kept busy by looks alone
_NOTE_EVERY_S = 1.0
_NOTES_PER_DEADLINE = 8
_FRESH_NOTES = 3  # a note that has not been renewed for so long is of a rank that does not run

_Note = list[tuple[int, str, list[int]]]  # who waits in which phase for whom; the next one is who is waited for


class Waiting:
    """The waits of one operation on one rank. For one thread at a time. ``keys_above`` and ``keys_below`` are those
    that were made in the parent's store and in the own."""

    def __init__(self, context: OperationContext, reports: Reports) -> None:
        self._context, self._reports = context, reports
        self._here, self._tree = context.communicator.here, context.communicator.tree
        self._parent = self._tree.parent(self._here.rank)
        self._is_parent = self._tree.child_count(self._here.rank) > 0
        self._longest_pause_s = max(LONGEST_PAUSE_S, self._tree.child_count(self._parent) * _PAUSE_PER_RANK_S)
        self._note_every_s = min(_NOTE_EVERY_S, context.deadline_s / _NOTES_PER_DEADLINE)
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._notes = 0
        self.keys_above: list[str] = []
        self.keys_below: list[str] = []

    def for_parent(self, phase: str, ready: Callable[[], bool]) -> None:
        """Until the parent has handed something on."""
        self._wait(phase, ready, lambda: [self._parent], is_for_children=False)

    def for_children(self, phase: str, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Until all children have handed something in."""
        self._wait(phase, ready, missing, is_for_children=True)

    def _wait(
        self, phase: str, ready: Callable[[], bool], missing: Callable[[], list[int]], *, is_for_children: bool
    ) -> None:
        start = time.monotonic()
        # Those above know better who is missing, so the verdict is left to them for a moment.
        deadline = start + self._context.deadline_s + (0.0 if is_for_children else self._context.grace_s)
        next_note = start + self._note_every_s
        pause = _FIRST_PAUSE_S
        while not ready():
            self._reports.raise_failure()
            self._reports.raise_death(phase, lambda: self._wanted(missing(), is_for_children))
            now = time.monotonic()
            if now > deadline:
                record = self._deadline_passed(phase, missing(), is_for_children)
                self._reports.raise_reported(record, is_late=True)
            if self._is_parent and now > next_note:
                next_note = now + self._note_every_s
                self._note(phase, missing(), is_for_children)
            # Where the store itself is silent, nobody above gives a verdict that could be waited for.
            self._context.above().be_patient(max(start + self._context.deadline_s - now, LATE_S))
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest_pause_s)
        self._clear_notes()

    def _wanted(self, missing: Sequence[int], is_for_children: bool) -> list[int]:
        """All whose end would end this wait as far as this rank knows."""
        if is_for_children:
            return [*missing, *self._culprits(missing)]
        return [*missing, *(rank for _, _, ranks in self._read(self._context.above(), self._parent) for rank in ranks)]

    def _note(self, phase: str, ranks: list[int], is_for_children: bool) -> None:
        """Write down for whom this rank waits, for its children and, where it waits for them, for its parent."""
        self._notes += 1
        own: _Note = [(self._here.rank, phase, ranks)]
        key = note_key(self._context.prefix, self._here.rank)
        if is_for_children and self._here.rank != 0:
            self.keys_above = self._context.above().put(key, msgpack.packb([self._notes, own]))
        if is_for_children:
            self._culprits(ranks)
        else:
            own += self._read(self._context.above(), self._parent)
        self.keys_below = self._context.below().put(key, msgpack.packb([self._notes, own]))

    def _clear_notes(self) -> None:
        if self.keys_above:
            self._context.above().delete(self.keys_above)
        if self.keys_below:
            self._context.below().delete(self.keys_below)
        self.keys_above, self.keys_below = [], []

    def _culprits(self, children: Sequence[int]) -> list[int]:
        """Those of whom it is known that they keep the children waiting; a child itself where it does not say."""
        found: list[int] = []
        line, now = self._context.below(), time.monotonic()
        for child in children:
            key = note_key(self._context.prefix, child)
            if len(self._tree.branch(child)) == 1 or not line.has(key):
                found.append(child)
                continue
            note = line.read(key)[0]
            if self._heard.get(child, (b"", 0.0))[0] != note:
                self._heard[child] = note, now
            is_fresh = now - self._heard[child][1] < _FRESH_NOTES * self._note_every_s
            steps = msgpack.unpackb(note)[1] if is_fresh else []
            found += [rank for _, _, ranks in steps for rank in ranks] or [child]
        return found

    def _read(self, line: Line, rank: int) -> _Note:
        key = note_key(self._context.prefix, rank)
        if self._here.rank == 0 or not line.has(key):
            return []
        return [(who, phase, ranks) for who, phase, ranks in msgpack.unpackb(line.read(key)[0])[1]]

    def _deadline_passed(self, phase: str, missing: list[int], is_for_children: bool) -> FailureRecord:
        late = self._culprits(missing) if is_for_children else missing
        message = (
            f"{self._context.kind}: rank {self._here.rank} on {self._here.host} waited {self._context.deadline_s:g} s "
            f"in {phase} for rank(s) {format_ranks(late)} of {self._tree.world_size}"
        )
        for _, of_phase, ranks in [] if is_for_children else self._read(self._context.above(), self._parent):
            message += f", which itself waits in {of_phase} for rank(s) {format_ranks(ranks)}"
        message += ". Look at what they were doing then, or give a longer deadline."
        return FailureRecord.of_deadline(message, phase, self._here)
