"""When a save is due, and how often the ranks ask each other. Pure: the time is handed in."""

from __future__ import annotations

from ..errors import StateError

__all__ = ["Cadence", "Pace"]

_MOST_TURNS = 10_000


class Cadence:
    """Due every ``every_steps`` steps, and ``every_minutes`` minutes after the last save began; either may be None."""

    def __init__(self, every_steps: int | None, every_minutes: float | None, now: float) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise StateError(f"every_steps is a whole number from 1 on, not {every_steps!r}")
        if every_minutes is not None and not every_minutes > 0:
            raise StateError(f"every_minutes is a positive number, not {every_minutes!r}")
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._last = now

    def is_due_at(self, step: int) -> bool:
        """The same answer on every rank."""
        return self._every_steps is not None and step % self._every_steps == 0

    def is_due_by(self, now: float) -> bool:
        """To be asked on one rank: clocks differ."""
        return self._every_minutes is not None and now - self._last >= 60 * self._every_minutes

    def began(self, now: float) -> None:
        """A save began."""
        self._last = now


class Pace:
    """How long a turn of the training loop takes, seen from the meetings, and so how many turns to the next meeting."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._turn, self._time = 0, 0.0

    def turns_to_next(self, turn: int, now: float) -> int:
        """How many turns after ``turn``, the present one, about ``interval_s`` will have gone by; at least one."""
        turns, seconds = turn - self._turn, now - self._time
        first, self._turn, self._time = self._turn == 0, turn, now
        if first or turns < 1:
            return 1
        if seconds * _MOST_TURNS < turns * self._interval_s:
            return _MOST_TURNS
        return max(1, int(self._interval_s * turns / seconds))
