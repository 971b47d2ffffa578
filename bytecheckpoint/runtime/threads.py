"""Threads of this library, and what runs before the interpreter shuts down their executors.

All are started here, so that a process that cannot start one gets an error of ours.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import ParamSpec, TypeVar

from ..errors import ThreadError, UsageError

T = TypeVar("T")
P = ParamSpec("P")

# The interpreter joins its executors before it runs atexit functions, and they accept no work from then on. Executors
# register with threading._register_atexit; functions registered there later run earlier.
_register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
_START_S = 1.0  # a busy executor has started its threads already


class Threads(ThreadPoolExecutor):
    """An executor whose ``submit`` raises ``ThreadError`` if the process cannot start another thread.

    From Python 3.12 on, no thread can start once the main thread has ended, although saves in flight are still being
    finished. Then a task waits for a thread of the executor, or runs in the thread that submits it if there is none.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        is_refused = False

        def call() -> T:
            if is_refused:
                raise CancelledError
            return fn(*args, **kwargs)

        try:
            return super().submit(call)
        except RuntimeError as error:
            if _is_closed(error):
                raise
            if not _is_exiting(error):
                is_refused = True  # it is in the queue of the threads that there are
                raise _thread_error(error) from error
        done: Future[T] = Future()
        _finish(done, call)
        is_refused = True
        return done

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not (self._threads and _is_exiting(error)):
                raise

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    def start(self) -> bool:
        """Start all threads, so that none is missing when no thread can start any more. Waits for no task of others.

        Returns whether there is a thread.
        """
        if len(self._threads) == self._max_workers:
            return True
        everyone = threading.Barrier(self._max_workers)

        def wait_for_others() -> None:
            with suppress(threading.BrokenBarrierError):
                everyone.wait()

        wait([self.submit(wait_for_others) for _ in range(self._max_workers)], _START_S)
        everyone.abort()  # some threads are busy; those that wait, and tasks that begin later, go on
        return bool(self._threads)


def run_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function, which may never return, in a daemon thread of this name.

    The interpreter can end while a worker of an engine, or a store, is stopped. Where it is ending and no thread can
    start any more, the function runs in this one.

    Raises:
        ThreadError: The process cannot start another thread.
    """
    called: Future[T] = Future()
    try:
        threading.Thread(target=_finish, args=(called, function), name=name, daemon=True).start()
    except RuntimeError as error:
        if not _is_exiting(error):
            raise _thread_error(error) from error
        _finish(called, function)
    return called


def _finish(called: Future[T], function: Callable[[], T]) -> None:
    """Set what the function returns or raises."""
    try:
        called.set_result(function())
    except BaseException as error:  # noqa: BLE001 - the thread that waits for the result raises it
        called.set_exception(error)
        del called  # breaks the reference cycle with this frame


def before_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the main thread has ended and executors still accept work; the last registered runs first.

    Raises as ``check_not_ending``.
    """
    check_not_ending()
    _register(function)


def is_ending() -> bool:
    """Whether the main thread has ended: executors accept work only until functions of ``before_exit`` have run."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def check_not_ending() -> None:
    """Raise ``UsageError`` if the main thread has ended."""
    if is_ending():
        raise UsageError(
            "the main thread of this process has ended, and what begins now might not be finished: "
            "let the main thread join the threads that save or load"
        )


def _is_closed(error: RuntimeError) -> bool:
    """Whether the executor accepts no tasks any more."""
    return "cannot schedule new futures" in str(error)


def _is_exiting(error: RuntimeError) -> bool:
    """Whether the interpreter starts no threads any more."""
    return "at interpreter shutdown" in str(error)


def _thread_error(error: RuntimeError) -> ThreadError:
    return ThreadError(f"{error}; raise the limit of this user's processes (ulimit -u) or of the container (pids.max)")
