"""An asynchronous save that failed is not missed, although no one asks its handle for the outcome."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import SaveFailedWarning
from bytecheckpoint.saving import lifecycle
from bytecheckpoint.testing import RankPool, time_limit

STATE: dict[str, Any] = {"extra_state": {"value": 1}}


@contextmanager
def broken_disk() -> Iterator[None]:
    def fail(name: str, event: str) -> None:
        if (name, event) == ("save.write", "enter"):
            raise OSError("a broken disk")

    stop = telemetry.observe(fail)
    try:
        yield
    finally:
        stop()


def fail(saver: bcp.Checkpointer, path: Path | str) -> bcp.SaveHandle:
    """Save, and wait until that has failed, without asking for the outcome."""
    ended = threading.Event()
    with broken_disk():
        handle = saver.save(path, STATE, async_save=True)
        handle.add_done_callback(lambda _: ended.set())
        assert ended.wait(time_limit(60))
    return handle


def test_close_raises_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a broken disk"), bcp.Checkpointer() as saver:
        fail(saver, tmp_path / "1")


def test_it_is_raised_before_the_callbacks_of_the_save_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regression: a manager that had waited for the save raised nothing if it was faster than a callback."""
    has_begun, go_on, call = threading.Event(), threading.Event(), lifecycle._call

    def fail_later(name: str, event: str) -> None:
        if (name, event) == ("save.write", "enter"):
            assert has_begun.wait(time_limit(60))
            raise OSError("a broken disk")

    def call_late(callback: Callable[[], None]) -> None:
        assert go_on.wait(time_limit(60))
        call(callback)

    monkeypatch.setattr(lifecycle, "_call", call_late)
    stop = telemetry.observe(fail_later)
    try:
        with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
            manager.save(1, STATE)
            has_begun.set()
            try:
                with pytest.raises(OSError, match="a broken disk"):
                    manager.wait()
            finally:
                go_on.set()
    finally:
        stop()


def test_it_does_not_replace_another_error(tmp_path: Path) -> None:
    def run() -> None:
        with bcp.Checkpointer() as saver:
            fail(saver, tmp_path / "1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_the_next_save_to_the_same_folder_warns_once_and_makes_up_for_it(tmp_path: Path) -> None:
    with bcp.Checkpointer() as saver:
        fail(saver, tmp_path / "1")
        saver.save(tmp_path / "other" / "1", STATE)
        with pytest.warns(SaveFailedWarning, match="1 failed, and no one asked for its outcome: a broken disk"):
            saver.save(tmp_path / "2", STATE)
        saver.save(tmp_path / "3", STATE)


def test_each_folder_warns_once(tmp_path: Path) -> None:
    with bcp.Checkpointer() as saver:
        for root in "ab":
            fail(saver, tmp_path / root / "1")
        with warnings.catch_warnings(record=True) as warned, broken_disk():
            warnings.simplefilter("always")
            for root in "abab":
                with pytest.raises(OSError, match="a broken disk"):
                    saver.save(tmp_path / root / "2", STATE)
        assert [one.category for one in warned] == [SaveFailedWarning] * 2
        for root in "ab":
            saver.save(tmp_path / root / "3", STATE)


@pytest.mark.parametrize("how", ["result", "exception", "uploaded"])
def test_who_asked_for_the_outcome_is_not_warned(tmp_path: Path, how: str) -> None:
    with bcp.Checkpointer() as saver:
        handle = fail(saver, tmp_path / "1")
        assert not handle.is_asked
        if how == "exception":
            assert isinstance(handle.exception(), OSError)
        else:
            with pytest.raises(OSError, match="a broken disk"):
                getattr(handle, how)()
        assert handle.is_asked
        saver.save(tmp_path / "2", STATE)


def _fail_on_one(rank: int, world_size: int, root: str) -> list[str]:
    options = {"deadline_s": time_limit(30)}
    found, ended = [], threading.Event()
    with bcp.Checkpointer() as saver:
        if rank == 1:
            with broken_disk():
                handle = saver.save(f"{root}/1", STATE, async_save=True, options=options)
                handle.add_done_callback(lambda _: ended.set())
                assert ended.wait(time_limit(60))
        else:
            handle = saver.save(f"{root}/1", STATE, async_save=True, options=options)
            handle.add_done_callback(lambda _: ended.set())
            assert ended.wait(time_limit(60))
        with pytest.warns(SaveFailedWarning) as warned:
            saver.save(f"{root}/2", STATE, options=options)
        found += [str(one.message) for one in warned]
    return found


def test_every_rank_warns(rank_pool: RankPool, tmp_path: Path) -> None:
    for (message,) in rank_pool.run(_fail_on_one, str(tmp_path), world_size=2):
        assert "1 failed" in message
        assert "a broken disk" in message
    assert bcp.open(tmp_path / "2").verify().ok


def test_a_save_of_which_a_later_one_has_warned_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "bytecheckpoint")  # a record would keep the error, and so the save
    with bcp.Checkpointer() as saver:
        handle = fail(saver, tmp_path / "1")
        with pytest.warns(SaveFailedWarning):
            saver.save(tmp_path / "2", STATE).result()
        kept = weakref.ref(handle)
        del handle
        gc.collect()
        assert kept() is None
