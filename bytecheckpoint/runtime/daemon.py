"""Calls in daemon threads: the interpreter must be able to end while a worker of an engine, or a store, is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_daemon"]

T = TypeVar("T")


def run_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function, which may never return, in a daemon thread of this name."""
    called: Future[T] = Future()

    def run(called: Future[T]) -> None:
        try:
            called.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the result raises it
            called.set_exception(error)
            del called  # breaks the reference cycle with this frame

    threading.Thread(target=run, args=(called,), name=name, daemon=True).start()
    return called
