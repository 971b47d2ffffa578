"""Asynchronous saves that failed, and whose outcome no one asked for: they must not be missed."""

from __future__ import annotations

import threading
import warnings

from ..checkpoint.location import Location
from ..errors import SaveFailedWarning, without_userinfo
from .handle import SaveHandle, failure_of

_CALLERS = 6  # frames from here to the caller of ``save``


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
