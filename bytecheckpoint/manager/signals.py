"""Signals that came, kept for the next turn of the training loop: a handler only takes a note."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ..errors import StateError

__all__ = ["SignalWatch"]

_log = logging.getLogger(__name__)


class SignalWatch:
    """Takes the place of the handlers of ``signals`` until ``close``, which puts the former ones back.

    A signal that came is in ``came``, with the time of its first coming on the monotonic clock; it does nothing else
    to the process, however often it comes. Python lets only the main thread handle signals: made in another one, it
    watches nothing and warns.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.came: dict[int, float] = {}
        self._former: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
        wanted = list(dict.fromkeys(signals))
        if wanted and threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals cannot be watched from %s: make the manager in the main thread",
                threading.current_thread().name,
            )
            return
        try:
            for number in wanted:
                self._former[number] = signal.signal(number, self._note)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise StateError(f"signal {number!r} cannot be watched: {error}") from error

    def close(self) -> None:
        """Put the former handlers back, where nobody else has put one in between."""
        self._closed = True
        for number in self._former:
            if signal.getsignal(number) == self._note:
                handler = self._handler_before(number)
                # None: a handler that was not set from Python; there is no way to put it back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handler_before(self, number: int) -> Any:
        """The former handler; where that is a watch's that was closed since, the one before it."""
        handler = self._former[number]
        watch = getattr(handler, "__self__", None)
        if isinstance(watch, SignalWatch) and watch._closed:
            return watch._handler_before(number)
        return handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a data loader's worker: it ends as it would have without us.
            handler = self._former[number]
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.kill(os.getpid(), number)
            return
        self.came.setdefault(number, time.monotonic())
