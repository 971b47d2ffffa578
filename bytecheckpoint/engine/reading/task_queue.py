"""Numbered tasks, taken in order by as many threads as the work is worth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

__all__ = ["TaskQueue"]


class TaskQueue:
    """Runs ``task(0, self)`` to ``task(count - 1, self)``, each once, on threads of ``executor``.

    Tasks are begun in order. Once one has failed no further one is begun; those before it run to their end, so that
    what ``run`` raises is the error of the first task that fails, whatever the threads do.
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
        """Run everything, with ``threads`` threads to begin with, and wait for it; a single task runs here."""
        if self._count == 1:
            self._work()
        else:
            self.widen(threads)
        try:
            self._wait()
        finally:
            # The caller was interrupted: nobody may go on writing into memory that is the caller's again.
            with self._lock:
                self._next = self._count
            self._wait()
        if self._errors:
            first = self._errors[min(self._errors)]
            self._errors.clear()
            try:
                raise first
            finally:
                del first  # its traceback has this frame

    def widen(self, threads: int) -> None:
        """Have at least so many threads work, from here on; to be called by a task, too."""
        with self._lock:
            missing = min(threads, self._count - self._next + len(self._workers)) - len(self._workers)
            self._workers += [self._executor.submit(self._work) for _ in range(missing)]

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
            # A worker that is waited for may have called for more.
            workers = self._workers[seen:]
            seen += len(workers)
            wait(workers)
            for worker in workers:
                worker.result()
