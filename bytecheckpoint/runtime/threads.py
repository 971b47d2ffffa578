"""Threads of this library, and what runs before the interpreter shuts down their executors.

All are started here, so that a process that cannot start one gets an error of ours.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..errors import ThreadError

T = TypeVar("T")
P = ParamSpec("P")

# The interpreter joins its executors before it runs atexit functions, and they accept no work from then on. Executors
# register with threading._register_atexit; functions registered there later run earlier.
_register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)


class Threads(ThreadPoolExecutor):
    """An executor whose ``submit`` raises ``ThreadError`` if the process cannot start another thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        is_refused = False

        def call() -> T:
            if is_refused:
                raise CancelledError
            return fn(*args, **kwargs)

        try:
            return super().submit(call)
        except RuntimeError as error:
            if _is_ended(error):
                raise
            is_refused = True  # it is in the queue of the threads that there are
            raise _thread_error(error) from error


def run_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function, which may never return, in a daemon thread of this name.

    The interpreter can end while a worker of an engine, or a store, is stopped.

    Raises:
        ThreadError: The process cannot start another thread.
    """
    called: Future[T] = Future()

    def run(called: Future[T]) -> None:
        try:
            called.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the result raises it
            called.set_exception(error)
            del called  # breaks the reference cycle with this frame

    try:
        threading.Thread(target=run, args=(called,), name=name, daemon=True).start()
    except RuntimeError as error:
        raise _thread_error(error) from error
    return called


def before_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the main thread has ended and executors still accept work; the last registered runs first.

    Raises ``RuntimeError`` if the interpreter is already shutting down.
    """
    _register(function)


def _is_ended(error: RuntimeError) -> bool:
    """Whether the executor, or the interpreter, has ended."""
    return "shutdown" in str(error)


def _thread_error(error: RuntimeError) -> ThreadError:
    return ThreadError(f"{error}; raise the limit of this user's processes (ulimit -u) or of the container (pids.max)")
