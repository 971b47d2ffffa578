"""The handle that a save returns, and those of asynchronous saves that failed and whose outcome no one asked for."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..checkpoint.location import Location
from ..engine.staging.staging import Staging
from ..errors import SaveFailedWarning, without_userinfo
from ..telemetry.trace import Timings, timings_table
from ..transfer.transfer import TransferReport
from .lifecycle import SaveLifecycle

_CALLERS = 6  # frames from here to the caller of ``save``


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint, and what this rank wrote of it.

    Attributes:
        url: Where the checkpoint is.
        step: The training step stored in it.
        attempt: The directory of its data files, relative to ``url``.
        bytes_written: Bytes that this rank wrote.
        files_written: Files that this rank wrote.
        seconds: How long each step took on this rank, in the order of the steps.
        remark: Why an incremental save wrote everything; empty if it did not.
    """

    url: str = field(repr=False)  # it may contain a password
    step: int | None
    attempt: str
    bytes_written: int
    files_written: int
    seconds: Mapping[str, float]
    remark: str = ""


class SaveHandle:
    """A save in progress, or one that has ended. Thread-safe.

    As with ``concurrent.futures``, ``result``, ``exception``, ``done`` and ``add_done_callback`` refer to one event:
    the commit, after which the checkpoint exists, durably and for every reader. If ``result`` raises, it does not
    exist, except after ``CommitUnknownError`` (the outcome is unknown) and ``SavePendingError`` (the save continues).

    With a tier (``bytecheckpoint.Location``), that is the commit in the tier. ``uploaded``, ``is_uploaded`` and
    ``add_uploaded_callback`` refer to the later one, in the store.

    Attributes:
        url: Where the checkpoint is saved.
        timings: How long each step took on this rank; complete when the save has ended.

    Example:
        >>> handle = bcp.save("runs/7b/step-1000", state, async_save=True)
        >>> handle.staged()            # the tensors may be changed
        True
        >>> handle.result()            # wait until the checkpoint is committed
        SaveResult(url=...)
    """

    def __init__(self, url: str, timings: Timings, lifecycle: SaveLifecycle[SaveResult]) -> None:
        self.url = url
        self.timings = timings
        self._lifecycle = lifecycle
        self._staging: Staging | None = None
        self._upload: SaveLifecycle[TransferReport] | None = None
        self._uploads_waiting: Callable[[], int] = int
        self._is_asked = False

    def staged(self) -> bool:
        """Return whether the state is copied.

        Kernels on the CUDA streams that were current in the call of ``save`` may change tensors earlier: these streams
        wait for the copies.

        Returns:
            True once any thread may change every tensor. That is as soon as ``save`` returns if all tensors are on the
            CPU and no gate was requested.
        """
        staging = self._staging
        if self.done():
            return True
        self._lifecycle.check_is_own()
        return staging is not None and staging.is_copied()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until ``staged`` returns True.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            False if ``timeout`` seconds passed before.
        """
        staging = self._staging
        if staging is None or self.done():
            return self._lifecycle.wait_final(timeout)
        self._lifecycle.check_is_own()
        return staging.wait_copied(timeout)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not; with a tier, the upload may continue."""
        return self._lifecycle.state.is_final

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait until the checkpoint is committed; with a tier, in the tier.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            What was committed.

        Raises:
            SavePendingError: The save has not ended after ``timeout`` seconds and continues. It is a ``TimeoutError``.
            UsageError: This process was forked from the one that saves.
            CommitUnknownError: The checkpoint may or may not exist.
            BytecheckpointError: The failure, on whichever rank it occurred. Nothing was committed.
        """
        try:
            return self._lifecycle.result(timeout)
        finally:
            self._is_asked |= self.done()

    def uploaded(self, timeout: float | None = None) -> SaveResult:
        """Wait until the checkpoint is committed at the path of the save; without a tier, the same as ``result``.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            What was committed.

        Raises:
            SavePendingError: The upload has not ended after ``timeout`` seconds and continues.
            UploadSkippedError: The upload was not made, because later checkpoints were saved before its turn, and
                ``CheckpointManager(keep=...)`` would have removed this one.
            BytecheckpointError: What ``result`` raises, or why the upload failed on any rank. The checkpoint is then
                still in the tier, from where ``bcp upload`` continues.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if self._upload is not None:
            self._upload.exception(timeout)  # it ends after the save, whose failure comes first
        result = self.result(None if end is None else max(0.0, end - time.monotonic()))
        if self._upload is not None:
            self._upload.result()
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, and return its error instead of raising it. Does not wait for an upload.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            The error that ``result`` raises; None if the checkpoint is committed.

        Raises:
            SavePendingError: The save has not ended after ``timeout`` seconds and continues.
        """
        try:
            return self._lifecycle.exception(timeout)
        finally:
            self._is_asked |= self.done()

    @property
    def is_asked(self) -> bool:
        """Whether ``result``, ``exception`` or ``uploaded`` has answered how the save ended.

        The failure of an asynchronous save for which no one asks is a ``SaveFailedWarning`` in the next save to the
        same folder, and an error of ``CheckpointManager.close`` and ``Checkpointer.close``, unless a later save to the
        folder is committed.
        """
        return self._is_asked

    def add_done_callback(self, callback: Callable[[SaveHandle], None]) -> None:
        """Call ``callback(handle)`` when the save has ended: after the commit, or with the failure.

        Args:
            callback: Runs on the thread that ends the save, or at once if the save has ended already. As with
                ``concurrent.futures``, ``result`` may return on another thread before the callback has run. Its
                exceptions are logged.
        """
        self._lifecycle.add_done_callback(lambda: callback(self))

    def __repr__(self) -> str:
        state = self._lifecycle.state
        return f"<SaveHandle {without_userinfo(self.url)} {state.name.lower() if state.is_final else 'pending'}>"

    def _repr_html_(self) -> str:
        state, error = "in progress", None
        if self.done():
            error = self._lifecycle.exception()
            state = "committed" if error is None else f"failed: {error}"
        elif self.staged():
            state = "staged, in progress"
        return timings_table(f"Save of {self.url}: {state}", self.timings)

    def is_uploaded(self) -> bool:
        """Return whether ``uploaded`` returns, or raises, at once."""
        return self.done() and (self._upload is None or self._upload.state.is_final)

    def uploads_waiting(self) -> int:
        """Return how many checkpoints this process has committed in a tier that wait for their upload.

        Returns:
            The number, whichever of them is that of this save; 0 without a tier.
        """
        return self._uploads_waiting()

    def add_uploaded_callback(self, callback: Callable[[SaveHandle], None]) -> None:
        """Call ``callback(handle)`` when ``uploaded`` returns or raises at once.

        Args:
            callback: As in ``add_done_callback``.
        """
        upload = self._upload
        (self._lifecycle if upload is None else upload).add_done_callback(lambda: callback(self))

    def _watch(self, staging: Staging) -> None:
        """Answer ``staged`` from ``staging`` until the save has ended, and release ``staging`` then."""
        self._staging = staging
        self._lifecycle.add_done_callback(self._release_staging)

    def _release_staging(self) -> None:
        self._staging = None


def failure_of(save: SaveHandle, timeout: float | None = None, *, uploaded: bool = False) -> BaseException | None:
    """Wait until a save has ended, or with ``uploaded`` its upload; return the error. Does not count as asking for it.

    Raises ``SavePendingError``.
    """
    if uploaded and save._upload is not None:
        return save._upload.exception(timeout)
    return save._lifecycle.exception(timeout)


def attempt_of(save: SaveHandle) -> str:
    """Wait until a save has ended, and return its attempt. Raises what it failed with. Does not count as asking."""
    return save._lifecycle.result().attempt


class FailedSaves:
    """The last failed save below each root of which no later save was committed. Thread-safe.

    ``follow`` and ``warn`` get the location of a checkpoint; its root is the folder that it is in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, list[SaveHandle]] = {}  # by root, in the order of their calls
        self._failed: dict[str, SaveHandle] = {}
        self._warned: set[str] = set()  # the roots of those of which ``warn`` has warned

    def follow(self, location: Location, save: SaveHandle) -> None:
        """Remember this save if it fails; once it is committed, forget those before it."""
        root = _root_of(location)
        with self._lock:
            self._running.setdefault(root, []).append(save)
        save.add_done_callback(lambda _: self._collect(root))

    def _collect(self, root: str) -> None:
        """Record which saves have failed. A thread that waited for one calls this too: it may be faster than the
        save's callback."""
        with self._lock:
            running = self._running.pop(root, [])
            for save in running:
                if not save.done():
                    self._running.setdefault(root, []).append(save)
                    continue
                self._warned.discard(root)
                if failure_of(save) is None:
                    self._failed.pop(root, None)
                else:
                    self._failed[root] = save

    def warn(self, location: Location) -> None:
        """Before a save to this location, warn of the one before it, once."""
        root = _root_of(location)
        self._collect(root)
        failed = self._failed.get(root)
        if failed is None or failed.is_asked or root in self._warned:
            return
        self._warned.add(root)
        warnings.warn(
            f"saving {without_userinfo(failed.url)} failed, and no one asked for its outcome: {failure_of(failed)}",
            SaveFailedWarning,
            stacklevel=_CALLERS,
        )

    def raise_for(self, location: Location | None = None) -> None:
        """Forget the failed saves next to this location, or all; raise the error of one whose outcome no one asked for.

        Raises:
            BytecheckpointError: What ``SaveHandle.result`` raises.
        """
        with self._lock:
            roots = {*self._running, *self._failed} if location is None else {_root_of(location)}
        for root in roots:
            self._collect(root)
        with self._lock:
            saves = [self._failed.pop(root) for root in roots if root in self._failed]
        for save in saves:
            if not save.is_asked:
                save.result()


def _root_of(location: Location) -> str:
    return location.url.rstrip("/").rpartition("/")[0]
