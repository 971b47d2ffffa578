"""Functions of the user that a manager calls when a save is staged, committed or failed, or a checkpoint removed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UsageError
from ..saving.handle import SaveHandle, SaveResult, failure_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions that a ``CheckpointManager`` calls on every rank. Their exceptions are logged and have no effect.

    Args:
        on_staged: Called with the handle of a save when its tensors may change: by ``manager.save``, on the training
            thread. Not called for a save that has failed by then.
        on_committed: Called with the result of a save when its checkpoint is committed, on the thread that saves.
        on_uploaded: With a tier: called with the result of a save when its checkpoint is committed below the root
            too, on the thread that uploads.
        on_failed: Called with the handle of a save and its error, on the thread that saves. Not called for a failure
            that ``manager.save`` itself raises, as it does for every failure of a save that is not asynchronous.
        on_removed: Called on rank 0 with the URL of a checkpoint that the retention rules removed, in the background.

    Raises:
        UsageError: A value is not callable.

    Example:
        >>> Callbacks(on_committed=lambda result: log(result.url, result.seconds))
    """

    on_staged: Callable[[SaveHandle], object] | None = None
    on_committed: Callable[[SaveResult], object] | None = None
    on_uploaded: Callable[[SaveResult], object] | None = None
    on_failed: Callable[[SaveHandle, BaseException], object] | None = None
    on_removed: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not callable(value):
                raise UsageError(f"Callbacks.{field.name} must be a function, not {value!r}")


class CallbackRunner:
    """Calls the callbacks of the saves of one rank. For the training thread, except ``removed``."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._unstaged: list[SaveHandle] = []

    def follow(self, handle: SaveHandle) -> None:
        """Call the callbacks of this save when it is time."""
        if self._callbacks.on_staged is not None:
            self._unstaged.append(handle)
            self.poll()
        handle.add_done_callback(self._ended)
        if self._callbacks.on_uploaded is not None:
            handle.add_uploaded_callback(self._uploaded)

    def poll(self) -> None:
        """Call ``on_staged`` of the saves that are staged by now."""
        for handle in self._unstaged[:]:
            if handle.staged():
                self._unstaged.remove(handle)
                if not handle.done() or failure_of(handle) is None:
                    _call(self._callbacks.on_staged, handle)

    def removed(self, url: str) -> None:
        """Call ``on_removed``. For any thread."""
        _call(self._callbacks.on_removed, url)

    def _uploaded(self, handle: SaveHandle) -> None:
        if failure_of(handle, uploaded=True) is None:
            _call(self._callbacks.on_uploaded, handle.uploaded())

    def _ended(self, handle: SaveHandle) -> None:
        error = failure_of(handle)
        if error is None:
            _call(self._callbacks.on_committed, handle.result())
        else:
            _call(self._callbacks.on_failed, handle, error)


def _call(callback: Callable[..., object] | None, *arguments: Any) -> None:
    if callback is None:
        return
    try:
        callback(*arguments)
    except Exception:  # noqa: BLE001 - foreign code must not fail the training
        _log.exception("a callback of the CheckpointManager failed")
