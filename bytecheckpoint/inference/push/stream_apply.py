"""Apply a stream on all engines while the senders write."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait

from ...errors import BytecheckpointError, DeadlineError, EngineError
from ...runtime.threads import run_daemon
from .coordinator import PushCoordinator
from .engines.base import Budget

_SLOWEST_BYTES_S = 50e6  # no working worker loads slower; other checks detect a stalled one
_CLEANUP_S, _LATE_S = 5.0, 0.5

_log = logging.getLogger(__name__)


class StreamApply:
    """Runs the request "stream" on all engines in a thread, while senders write.

    When the coordinator stops waiting for the thread, the push is abandoned: the thread sends no further request,
    because the next push may have begun.
    """

    def __init__(self, coordinator: PushCoordinator, version: int | str) -> None:
        self._coordinator, self._deadline_s = coordinator, coordinator.deadline_s
        self._is_abandoned = threading.Event()
        self._has_reported = False  # whether `end` has raised or returned everything there is to report
        longest = max((layout.nbytes for layout in coordinator.bound.plan.layouts), default=0)
        # Longer than the workers' own deadlines, so that they can report what went wrong.
        budget = Budget(2 * self._deadline_s + longest / _SLOWEST_BYTES_S)
        self._applied = run_daemon(
            lambda: coordinator.apply(version, budget, "stream", self._is_abandoned.is_set), "bcp-push-stream"
        )

    def end(self, broken: tuple[bool, str] | None) -> None:
        """Wait until all engines serve the version, after all senders have finished or a stream has ``broken``
        (whether it was late, and why). Raises what went wrong, with what the engines serve now."""
        is_late, text = broken or (False, "")
        # A worker that made no room in time is unlikely to answer now.
        wait([self._applied], _LATE_S if is_late else _CLEANUP_S if broken else self._deadline_s)
        self._has_reported = True
        is_silent = not self._applied.done()
        if not is_silent:
            self._applied.result()
        if is_silent or broken:
            text = text or f"the engines did not apply the stream within {self._deadline_s:g} s"
            raise (DeadlineError if is_silent else EngineError)(f"{text}\n  {self._state_after_failure(_LATE_S)}")
        self._coordinator.finish(Budget(self._deadline_s))

    def explain(self, error: BaseException) -> None:
        """Add to a sender's failure what the engines serve after it, unless ``end`` has raised that."""
        if self._has_reported:
            return
        after = self._state_after_failure(_CLEANUP_S)
        if isinstance(error, BytecheckpointError):
            error.args = (f"{error}\n  {after}",)
        else:
            _log.error("push: %s", after)

    def _state_after_failure(self, wait_s: float) -> str:
        """Return what the engines serve. Abandons engines that do not answer."""
        wait([self._applied], wait_s)
        if not self._applied.done():
            self._is_abandoned.set()
            return (
                "the engines have not answered since, and are left paused; when their workers answer again, they serve "
                "what is complete, or `bcp push --resume URL` or the next push resumes them"
            )
        error = self._applied.exception()
        return "the engines serve the new version" if error is None else str(error)
