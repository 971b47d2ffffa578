"""Rank 0's part of a stream: while senders write, the engines are at one request that ends when all is put in."""

from __future__ import annotations

import threading

from ...errors import DeadlineError, EngineError
from .engines import Budget
from .lead import Lead

__all__ = ["Stream"]

_SLOWEST = 50e6  # bytes a second and worker: nothing that works is slower, and what stalls is noticed by other means
_LAST_WORDS_S, _LATE_S = 5.0, 0.5


class Stream:
    """Has all engines paused, put in what comes, and resumed, in a thread of its own. Where that is still at it when
    this rank waits no more, it says nothing more to the engines: the next push may have begun."""

    def __init__(self, lead: Lead, version: int | str, deadline_s: float) -> None:
        self._lead, self._deadline_s = lead, deadline_s
        self._error: BaseException | None = None
        self._given_up = threading.Event()
        self.has_told = False
        """Whether ``end`` has said all that there is to say."""
        longest = max((layout.nbytes for layout in lead.planned.plan.layouts), default=0)
        # Workers wait for so long themselves, and then have something to say.
        budget = Budget(2 * deadline_s + longest / _SLOWEST)
        # A daemon, as the interpreter must be able to end while a worker is stopped.
        self._thread = threading.Thread(target=self._run, args=(version, budget), name="bcp-push-stream", daemon=True)
        self._thread.start()

    def _run(self, version: int | str, budget: Budget) -> None:
        try:
            self._lead.apply(version, budget, "stream", self._given_up.is_set)
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            self._error = error

    def end(self, broken: tuple[bool, str] | None) -> None:
        """Senders have come to their end, unless the stream of one is ``broken``: too late, and why. Return when all
        engines serve the version; raises what went wrong, with what is served now."""
        late, text = broken or (False, "")
        # Who made no room for so long will hardly answer now.
        self._thread.join(_LATE_S if late else _LAST_WORDS_S if broken else self._deadline_s)
        self.has_told = True
        if self._error is not None:
            raise self._error
        silent = self._thread.is_alive()
        if silent or broken:
            text = text or f"what was sent was not put in within {self._deadline_s:g} s"
            raise (DeadlineError if silent else EngineError)(f"{text}\n  {self.gone_wrong()}")
        self._lead.finish(Budget(self._deadline_s))

    def gone_wrong(self) -> str:
        """What the engines made of a sender's failure. They are given up where they do not say."""
        self._thread.join(_LATE_S if self.has_told else _LAST_WORDS_S)
        if self._thread.is_alive():
            self._given_up.set()
            return "the engines have not answered since, and are left paused; the next push resumes them"
        return "the engines serve the new version" if self._error is None else str(self._error)
