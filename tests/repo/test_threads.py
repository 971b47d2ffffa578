"""A process that cannot start a thread gets an error of the library's tree."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.errors import ThreadError
from bytecheckpoint.runtime.threads import Threads, run_daemon
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(5, of=__name__)

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


def _refuse_at_exit(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_an_interpreter_that_ends_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks wait for the threads that there are; where there are none, they run in this thread."""
    names: list[str] = []

    def note() -> None:
        names.append(threading.current_thread().name)

    with Threads(2, "bcp-one") as started, Threads(2) as idle:
        started.submit(int).result(time_limit(20))
        monkeypatch.setattr(threading.Thread, "start", _refuse_at_exit)
        for _ in range(3):
            started.submit(note).result(time_limit(20))
            idle.submit(note).result(time_limit(20))
        run_daemon(note, "a-daemon").result(time_limit(20))
        with pytest.raises(ZeroDivisionError):
            idle.submit(divmod, 1, 0).result(time_limit(20))
        monkeypatch.undo()
        assert idle.submit(int).result(time_limit(20)) == 0
    here = threading.current_thread().name
    assert names == ["bcp-one_0", here] * 3 + [here]


def test_all_threads_start_early() -> None:
    with Threads(3, "bcp-three") as threads:
        threads.start()
        assert sum(thread.name.startswith("bcp-three") for thread in threading.enumerate()) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_an_early_start_waits_for_no_task(count: int) -> None:
    """A regression: the first save of a manager waited for the uploads of an earlier job, which may take hours."""
    go_on = threading.Event()
    with Threads(count, "bcp-busy") as threads:
        busy = threads.submit(go_on.wait, time_limit(60))
        threads.start()
        assert not busy.done()
        go_on.set()
        assert threads.submit(divmod, 7, 2).result(time_limit(20)) == (3, 1)


_SAVE_AT_EXIT = """
import sys, threading, torch
import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.runtime.threads import before_exit

how, root, ends = sys.argv[1], bcp.Location(sys.argv[2]), threading.Event()
if "tier" in how:
    root = bcp.Location(sys.argv[2], tier=bcp.Tier(sys.argv[3]))
options = {"base": "auto"} if "incremental" in how else None

def end():
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = refuse
    ends.set()

if "manager" in how:
    manager = bcp.CheckpointManager(root, cadence=1, keep=1, save=options)
for step in (1, 2):
    state = {"model": {"w": torch.full((1 << 20,), float(step))}}
    if step == 2:
        handle.result()
        telemetry.observe(lambda name, event: name.endswith(".commit") and ends.wait(60))
    if "manager" in how:
        handle = manager.save(step, state)
    else:
        handle = bcp.save(root.join(f"step-{step}"), state, async_save=True, options=options)
before_exit(end)
"""


@pytest.mark.parametrize(
    "how", ["plain", "tier", "incremental", "incremental-tier", "manager", "manager-incremental-tier"]
)
def test_saves_in_flight_when_the_interpreter_ends(tmp_path: Path, how: str) -> None:
    """A regression: from Python 3.12 on, no thread starts after the main thread has ended: saves failed or hung."""
    places = [str(tmp_path / "root"), str(tmp_path / "tier")]
    done = warm_python().run(["-W", "ignore", "-c", _SAVE_AT_EXIT, how, *places], timeout=time_limit(120))
    assert (done.returncode, done.stderr) == (0, "")
    left = sorted(path.name for path in (tmp_path / "root").iterdir())
    assert [name for name in left if name not in ("objects", "step-1")] == ["step-2"]
    assert ("step-1" in left) != ("manager" in how)
    for name in {*left} - {"objects"}:
        assert bcp.open(tmp_path / "root" / name).verify().ok


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
