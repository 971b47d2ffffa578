"""Task queues: order, number of threads, and errors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bytecheckpoint.engine.reading.task_queue import TaskQueue
from bytecheckpoint.errors import StateError
from bytecheckpoint.testing import time_limit


def test_every_task_runs_once_on_the_requested_threads() -> None:
    done: list[int] = []
    threads: set[int] = set()
    barrier = threading.Barrier(3)

    def task(index: int, queue: TaskQueue) -> None:
        if index < 3:
            queue.widen(3)
            barrier.wait(time_limit(60))  # breaks, and fails the test, unless three run at once
        done.append(index)
        threads.add(threading.get_ident())

    with ThreadPoolExecutor(5) as pool:
        TaskQueue(pool, 50, task).run(1)
    assert sorted(done) == [*range(50)]
    assert len(threads) <= 3


def test_a_single_task_runs_on_the_calling_thread() -> None:
    threads: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        TaskQueue(pool, 1, lambda index, queue: threads.append(threading.get_ident())).run(4)
        TaskQueue(pool, 0, lambda index, queue: threads.append(-1)).run(4)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_error_is_raised_and_no_task_starts_after_it(threads: int) -> None:
    begun: list[int] = []
    failed = threading.Event()

    def task(index: int, queue: TaskQueue) -> None:
        begun.append(index)
        if index == 3:
            failed.set()
            raise ValueError("3")
        if index == 2 and threads > 1:
            assert failed.wait(time_limit(60))
            raise ValueError("2")
        while index > 3 and not queue._errors:
            time.sleep(0)  # the queue records the error shortly after it is raised

    with ThreadPoolExecutor(4) as pool, pytest.raises(ValueError, match="2" if threads > 1 else "3"):
        TaskQueue(pool, 1000, task).run(threads)
    assert len(begun) <= 4 + threads


def test_a_process_that_may_start_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    done: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
        TaskQueue(pool, 50, lambda index, queue: done.append(index)).run(4)
    assert sorted(done) == [*range(50)]


def test_an_executor_that_was_shut_down() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(StateError, match="no thread can read: cannot schedule new futures after shutdown"):
        TaskQueue(pool, 2, lambda index, queue: None).run(1)
