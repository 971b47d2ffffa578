"""What a save returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from .engine.staging.staging import Staging
from .errors import SaveSkippedError
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
    (except ``CommitUnknownError``, which says so). ``skipped``: the save was not made, because it would have had to
    wait and the caller asked for that; ``result`` raises ``SaveSkippedError``.
    """

    def __init__(self, url: str, timings: Timings) -> None:
        self.url = url
        self.timings = timings
        self._future: Future[SaveResult] = Future()
        self._staging: Staging | None = None
        self._staged = threading.Event()
        self.skipped = False

    def staged(self) -> bool:
        """Whether the state was copied, so that every tensor may be changed, anywhere. True from the return of ``save``
        on where all tensors are on the CPU and no gate was asked for. Kernels on the streams of a device that were
        current in the call may change tensors at once: they wait for the copies."""
        staging = self._staging
        return self._staged.is_set() or (staging is not None and staging.is_settled())

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until ``staged``; False if that took longer than ``timeout`` seconds."""
        staging = self._staging
        if staging is None or self._staged.is_set():
            return self._staged.wait(timeout)
        return staging.wait_settled(timeout)

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
        state = "pending"
        if self.done():
            state = "skipped" if self.skipped else "failed" if self.exception() else "committed"
        return f"<SaveHandle {self.url} {state}>"

    def _watch(self, staging: Staging) -> None:
        """``staging`` knows from now on whether the state was copied."""
        self._staging = staging

    def _let_go(self) -> None:
        self._staged.set()
        self._staging = None

    def _succeed(self, result: SaveResult) -> None:
        self._let_go()
        self._future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        self._let_go()
        self._future.set_exception(error)

    def _skip(self) -> None:
        self.skipped = True
        self._fail(
            SaveSkippedError(
                f"{self.url} was not saved: earlier saves are still being written and hold the staging memory, and "
                f"when_busy='skip' was asked for; save less often, raise the memory budget, or wait"
            )
        )
