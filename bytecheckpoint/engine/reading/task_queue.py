"""Run numbered tasks in order on a variable number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from ...errors import StateError


class TaskQueue:
    """Runs ``task(0, self)`` to ``task(count - 1, self)``, each once, on threads of ``executor``.

    Tasks start in order. After a failure no further task starts, but running ones finish. So ``run`` always raises the
    error of the failing task with the lowest number.
    """

    def __init__(self, executor: Executor, count: int, task: Callable[[int, TaskQueue], None]) -> None:
        self._executor = executor
        self._task = task
        self._count = count
        self._next = 0
        self._errors: dict[int, BaseException] = {}
        self._workers: list[Future[None]] = []
        self._lock = threading.Lock()

    def run(self, threads: int) -> None:
        """Run all tasks, first on ``threads`` threads, and wait for them. A single task runs on the calling thread."""
        if self._count == 1:
            self._work()
        else:
            self.widen(threads)
        try:
            self._wait()
        finally:
            # After an interrupt, no thread may write into memory that is the caller's again.
            with self._lock:
                self._next = self._count
            self._wait()
        if self._errors:
            first = self._errors[min(self._errors)]
            self._errors.clear()
            try:
                raise first
            finally:
                del first  # its traceback refers to this frame

    def widen(self, threads: int) -> None:
        """Use ``threads`` threads from now on, if so many can be started. Tasks may call this too."""
        with self._lock:
            missing = min(threads, self._count - self._next + len(self._workers)) - len(self._workers)
            for _ in range(missing):
                try:
                    self._workers.append(self._executor.submit(self._work))
                except RuntimeError as error:
                    if not self._workers:
                        raise StateError(f"no thread can read: {error}") from error
                    return  # the process may start no further thread; those that run do the rest

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._next >= self._count or self._errors:
                    return
                index = self._next
                self._next += 1
            try:
                self._task(index, self)
            except BaseException as error:  # noqa: BLE001 - raised by run
                with self._lock:
                    self._errors[index] = error
                return

    def _wait(self) -> None:
        seen = 0
        while seen < len(self._workers):
            # A worker may have called ``widen``.
            workers = self._workers[seen:]
            seen += len(workers)
            wait(workers)
            for worker in workers:
                worker.result()
