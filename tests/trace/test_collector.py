"""Pause the garbage collector, and restore its state when all pauses have ended."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.runtime.gc_pause import paused
from bytecheckpoint.testing import time_limit


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_pauses_of_several_threads(enabled: bool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused():
            inside.set()
            assert leave.wait(time_limit(30))

    with paused():
        assert not gc.isenabled()
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(time_limit(30))
        with pytest.raises(RuntimeError), paused():
            raise RuntimeError
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled() == enabled


def test_a_save_and_a_load_restore_it(enabled: bool, tmp_path: Path) -> None:
    seen: dict[str, bool] = {}
    stop = telemetry.observe(lambda name, event: seen.update({f"{name} {event}": gc.isenabled()}))
    try:
        state = {"model": {"w": torch.ones(3)}}
        bcp.save(tmp_path / "c", state)
        bcp.load(tmp_path / "c", state)
        with pytest.raises(bcp.errors.BytecheckpointError):
            bcp.load(tmp_path / "c", {"model": {"w": torch.ones(4)}})
    finally:
        stop()
    assert gc.isenabled() == enabled
    for step in ("save.describe", "save.plan", "load.describe", "load.plan"):
        assert not seen[f"{step} enter"], step
    for step in ("save.confirm", "load.read"):
        assert seen[f"{step} enter"] == enabled, step


def test_a_child_forked_during_a_pause_collects() -> None:
    job = """
import gc, os, sys, threading
from bytecheckpoint.runtime.gc_pause import paused
inside, leave = threading.Event(), threading.Event()
def other():
    with paused():
        inside.set()
        leave.wait(30)
thread = threading.Thread(target=other)
thread.start()
inside.wait(30)
child = os.fork()
if not child:
    with paused():
        assert not gc.isenabled()
    os._exit(0 if gc.isenabled() else 3)
leave.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    warm_python().run(["-W", "ignore", "-c", job], check=True, timeout=time_limit(60))
