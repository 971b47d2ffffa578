"""A process that cannot start a thread gets an error of the library's tree."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from warm_python import warm_python

from bytecheckpoint.errors import ThreadError
from bytecheckpoint.runtime.threads import Threads, run_daemon
from bytecheckpoint.testing import time_limit

PACKAGE = Path(__file__).parents[2]


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_executor_that_cannot_start_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is not called later, by a thread that the executor has already."""
    begun, go_on, called = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        begun.set()
        go_on.wait(time_limit(20))

    with Threads(2) as threads:
        first = threads.submit(wait)
        assert begun.wait(time_limit(20))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            with pytest.raises(ThreadError, match="ulimit -u"):
                threads.submit(called.append, 1)
            with pytest.raises(ThreadError, match="ulimit -u"):
                run_daemon(lambda: None, "a-daemon")
        go_on.set()
        first.result(time_limit(20))
        threads.submit(called.append, 2).result(time_limit(20))
    assert called == [2]
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(called.append, 3)


_SAVE = """
import sys, threading, torch
import bytecheckpoint as bcp

def refuse(thread):
    raise RuntimeError("can't start new thread")

start, threading.Thread.start = threading.Thread.start, refuse
state = {"model": {"w": torch.ones(1 << 20)}}
for options in ({}, {"async_save": True}):
    try:
        bcp.save(sys.argv[1], state, **options).result()
    except bcp.errors.BytecheckpointError as error:
        assert "thread" in str(error), error
    else:
        raise AssertionError("no error")
threading.Thread.start = start
bcp.save(sys.argv[1], state)
assert bcp.open(sys.argv[1]).verify().ok
"""


def test_a_save_that_cannot_start_a_thread(tmp_path: Path) -> None:
    warm_python().run(["-c", _SAVE, str(tmp_path / "x")], check=True, timeout=time_limit(120))


def test_all_executors_are_made_in_one_place() -> None:
    made = re.compile(r"\bThreadPoolExecutor\(")
    found = [
        str(path.relative_to(PACKAGE))
        for folder in ("bytecheckpoint", "planners", "storage_backends")
        for path in (PACKAGE / folder).rglob("*.py")
        if made.search(path.read_text()) and "testing" not in path.parts
    ]
    assert found == []
