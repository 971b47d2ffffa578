"""Record signals until the next coordination round; the handler itself only stores the time of arrival."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from ..errors import UsageError

_log = logging.getLogger(__name__)


class SignalWatch:
    """Replaces the handlers of ``signals`` until ``close``, which restores the previous ones.

    ``received`` maps each signal to the time of its first arrival on the monotonic clock. A signal has no other effect
    on the process until its ``grace_s`` has passed since its first arrival. Then, and if ``is_abandoned`` returns True,
    it has the effect that it had before the watch: a training loop that hangs, or that has lost its manager, can be
    ended. Python handles signals only in the main thread: created in another thread, a watch records nothing and logs a
    warning.
    """

    def __init__(
        self,
        signals: Iterable[int],
        *,
        grace_s: Mapping[int, float] | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self.received: dict[int, float] = {}
        self._grace_s, self._is_abandoned = dict(grace_s or {}), is_abandoned
        self._previous: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
        numbers = list(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals cannot be handled from thread %s: enter the manager in the main thread",
                threading.current_thread().name,
            )
            return
        try:
            for number in numbers:
                self._previous[number] = signal.signal(number, self._record)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise UsageError(f"no handler can be installed for signal {number!r}: {error}") from error

    def close(self) -> None:
        """Restore the previous handlers, except where other code has installed another one since."""
        self._closed = True
        for number in self._previous:
            if signal.getsignal(number) == self._record:
                handler = self._handler_before(number)
                # None: a handler that was not installed from Python and cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handler_before(self, number: int) -> Any:
        """The previous handler; if it belongs to a watch that is closed or abandoned by now, the one before that."""
        handler = self._previous[number]
        watch = getattr(handler, "__self__", None)
        if isinstance(watch, SignalWatch) and (watch._closed or watch._is_abandoned()):
            return watch._handler_before(number)
        return handler

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        waited_s = now - self.received.setdefault(number, now)
        is_inherited = os.getpid() != self._pid  # by a forked child, such as a data loader's worker
        if is_inherited or self._is_abandoned() or waited_s > self._grace_s.get(number, math.inf):
            handler = self._handler_before(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.kill(os.getpid(), number)
