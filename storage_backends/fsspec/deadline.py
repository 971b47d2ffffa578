"""Calls of file systems that may never return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, TypeVar

from ...runtime.daemon import run_daemon

__all__ = ["BoundedFileSystem", "call_within"]

_T = TypeVar("_T")


def call_within(deadline_s: float, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """Return the result of a function, which runs in another thread.

    Clients wait as they like, some for ever, and cannot be interrupted. After the deadline the thread goes on: it is a
    daemon, so that it does not keep the process from ending.

    Raises:
        TimeoutError: It has not returned within ``deadline_s`` seconds.
    """
    done = run_daemon(partial(function, *arguments, **options), "bcp-fsspec")
    try:
        return done.result(deadline_s)
    except FutureTimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"the store did not answer within {deadline_s:g} s") from None


class BoundedFileSystem:
    """A file system whose methods raise ``TimeoutError`` after a deadline.

    ``deadline`` returns the seconds of one call. ``is_stuck`` is true once a call was abandoned.
    """

    def __init__(self, fs: Any, deadline: Callable[[], float]) -> None:
        self.fs, self.is_stuck = fs, False
        self._deadline = deadline

    def call(self, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Call a function that uses the file system, such as a method of one of its files."""
        deadline_s = self._deadline()
        try:
            return call_within(deadline_s, function, *arguments, **options)
        except TimeoutError:
            self.is_stuck = True
            raise

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.fs, name)
        return partial(self.call, value) if callable(value) and not name.startswith("_") else value
