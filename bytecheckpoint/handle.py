"""What a save returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from .trace import Timings

__all__ = ["SaveHandle", "SaveResult"]


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint: where it is, and what this rank wrote of it."""

    url: str
    step: int | None
    attempt: str
    bytes_written: int
    files_written: int


class SaveHandle:
    """A save on its way, or done. Thread-safe.

    The checkpoint exists, durably and for every reader, when ``result`` returns; it does not when ``result`` raises
    (except ``CommitUnknownError``, which says so).
    """

    def __init__(self, url: str, timings: Timings) -> None:
        self.url = url
        self.timings = timings
        self._future: Future[SaveResult] = Future()
        self._staged = threading.Event()

    def staged(self) -> bool:
        """Whether the state was copied, so that every tensor may be changed. True from the return of ``save`` on
        wherever no gate was asked for."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until ``staged``; False if that took longer than ``timeout`` seconds."""
        return self._staged.wait(timeout)

    def done(self) -> bool:
        """Whether the save ended, well or badly."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait until the checkpoint is committed. Raises what went wrong on any rank; ``TimeoutError`` after
        ``timeout`` seconds (the save goes on)."""
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that ended the save, None if it succeeded. Waits like ``result``."""
        return self._future.exception(timeout)

    def add_done_callback(self, callback: Callable[[SaveHandle], None]) -> None:
        """Call ``callback(handle)`` when the save ended: after the commit or with the failure, never before. It runs
        in the thread that finished the save, or at once if that was earlier."""
        self._future.add_done_callback(lambda _: callback(self))

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self.exception() else "committed"
        return f"<SaveHandle {self.url} {state}>"

    def _mark_staged(self) -> None:
        self._staged.set()

    def _succeed(self, result: SaveResult) -> None:
        self._future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        self._future.set_exception(error)
