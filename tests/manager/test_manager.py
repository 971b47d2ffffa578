"""``CheckpointManager`` in a job of one process: cadence, retention, resuming, damage, signals, the lease."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import textwrap
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import with_version
from sorted_arguments import managing
from torch import nn
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint.attempts import attempt_name, new_attempt_id
from bytecheckpoint.checkpoint.lease import LEASE_KEY
from bytecheckpoint.errors import (
    MismatchError,
    NoValidCheckpointError,
    RootInUseError,
    SaveFailedWarning,
    StorageError,
    StorageFullError,
    UnknownObjectError,
    UnsupportedVersionError,
    UsageError,
)
from bytecheckpoint.manager import coordinator
from bytecheckpoint.manager.housekeeping import Cleaner, Housekeeping
from bytecheckpoint.manager.resources import _release_at_exit
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit


def _state(value: float = 0.0) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return {"model": model, "extra_state": {"value": value}}


def _names(root: Path) -> list[str]:
    """The committed checkpoints."""
    names = [path.parent.name for path in root.glob("step-*/manifest.msgpack")]
    return sorted(names, key=lambda name: int(name[5:]))


def _value(root: Path, **options: Any) -> float | None:
    """The value with which a new job would resume."""
    state = _state(-1.0)
    with bcp.CheckpointManager(root) as manager:
        if manager.resume(state, **options) is None:
            assert state["extra_state"]["value"] == -1.0
            return None
    values = {*state["model"].weight.flatten().tolist(), *state["model"].bias.tolist(), state["extra_state"]["value"]}
    assert len(values) == 1
    return float(values.pop())


def _save_all(root: Path, steps: Iterable[int], **options: Any) -> None:
    with bcp.CheckpointManager(root, cadence=1, **managing(**options)) as manager:
        for step in steps:
            manager.save(step, _state(float(step)), metrics={"loss": abs(step - 4)})


# -- cadence and retention ------------------------------------------------------------------------------------------


def test_saves_every_n_steps(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=3) as manager:
        handles = [manager.save(step, _state(float(step))) for step in range(1, 11)]
    assert [handle is not None for handle in handles] == [step % 3 == 0 for step in range(1, 11)]
    assert _names(tmp_path) == ["step-3", "step-6", "step-9"]
    assert _value(tmp_path) == 9.0
    assert not (tmp_path / LEASE_KEY).exists()


def test_a_part_of_the_state_is_saved_and_resumed(tmp_path: Path) -> None:
    state = _state(1.0)
    state["model"].weight.requires_grad_(False)
    options: dict[str, Any] = {"cadence": 1, "trainable_only": True, "exclude": ["extra_state"]}
    with bcp.CheckpointManager(tmp_path, **managing(**options)) as manager:
        manager.save(1, state)
    assert list(bcp.open(tmp_path / "step-1")) == ["model.bias"]
    other = _state(5.0)
    with bcp.CheckpointManager(tmp_path, **managing(**options)) as manager:
        report = manager.resume(other)
    assert report is not None
    assert report.left_out == ["extra_state.value", "model.weight"]
    assert other["model"].bias.tolist() == [1.0, 1.0]
    assert other["extra_state"]["value"] == 5.0


def test_forced_and_requested_saves(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return _state()

    with bcp.CheckpointManager(tmp_path) as manager:
        assert manager.save(1, make) is None
        assert made == []
        assert manager.save(2, make, force=True) is not None
        manager.request_save()
        for step in range(3, 20):
            manager.save(step, make)
    assert len(made) == len(_names(tmp_path)) == 2


def test_saves_by_the_clock(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=bcp.Cadence(every_minutes=1e-9)) as manager:
        manager.save(1, _state())
        manager.save(2, _state())
    assert _names(tmp_path) == ["step-1", "step-2"]


def test_a_step_is_saved_only_once_unless_it_is_forced(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1, job=bcp.JobOptions(when_busy="skip")) as manager:
        assert manager.save(1, _state(1.0)) is not None
        assert manager.save(1, _state(2.0)) is None
        assert manager.save(1, _state(3.0), force=True) is not None
    assert _names(tmp_path) == ["step-1"]
    assert _value(tmp_path) == 3.0


def test_retention(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 13), keep=bcp.Retention(last=2, every_steps=5, best=1, metric="loss"))
    assert _names(tmp_path) == ["step-4", "step-5", "step-10", "step-11", "step-12"]
    assert bcp.open(tmp_path / "step-4").metadata == {"metrics": {"loss": 0.0}}


def test_retention_by_age_includes_checkpoints_of_earlier_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, hours in ((1, 60), (2, 40), (3, 20)):
        created = (datetime.now(UTC) - timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        monkeypatch.setattr("bytecheckpoint.saving.record.timestamp", lambda created=created: created)
        bcp.save(tmp_path / f"step-{step}", _state(), step=step)
    monkeypatch.undo()
    _save_all(tmp_path, [4, 5], keep=bcp.Retention(last_hours=48))
    assert _names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]
    _save_all(tmp_path, [6], keep=bcp.Retention(last_hours=30))
    assert _names(tmp_path) == ["step-3", "step-4", "step-5", "step-6"]


def test_retention_includes_checkpoints_of_earlier_jobs(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 7), keep=bcp.Retention(last=3, best=1, metric="loss"))
    assert _names(tmp_path) == ["step-4", "step-5", "step-6"]
    (tmp_path / "step-6" / "notes.txt").write_text("not part of a checkpoint")
    (tmp_path / "other-1").mkdir()
    bcp.save(tmp_path / "other-2", _state())
    _save_all(tmp_path, range(7, 9), keep=bcp.Retention(last=1, best=1, metric="loss"))
    assert _names(tmp_path) == ["step-4", "step-8"]
    assert [path.name for path in (tmp_path / "step-6").iterdir()] == ["notes.txt"]
    assert (tmp_path / "other-2" / "manifest.msgpack").exists()


def test_a_job_that_went_back_keeps_its_new_checkpoint(tmp_path: Path) -> None:
    _save_all(tmp_path, range(8, 10))
    with bcp.CheckpointManager(tmp_path, cadence=1, keep=1) as manager:
        manager.save(3, _state(3.0))
    assert _names(tmp_path) == ["step-3"]


def test_a_checkpoint_that_is_being_overwritten_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping scanned the root when the old checkpoint was there, and is about to remove it after a save into the
    same folder has begun or committed."""
    _save_all(tmp_path, [1, 2])
    has_scanned, may_remove = threading.Event(), threading.Event()
    scan_root = Housekeeping._scan_root

    def slowly(self: Housekeeping) -> Any:
        found = scan_root(self)
        has_scanned.set()
        assert may_remove.wait(time_limit(60))
        return found

    monkeypatch.setattr(Housekeeping, "_scan_root", slowly)
    with bcp.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(3, _state(3.0), force=True)
        assert has_scanned.wait(time_limit(60))
        manager.save(2, _state(4.0), force=True)
        manager.wait()
        may_remove.set()
    assert _names(tmp_path) == ["step-2"]
    assert _value(tmp_path) == 4.0


def test_retention_still_counts_the_checkpoint_that_a_failed_save_did_not_replace(tmp_path: Path) -> None:
    _save_all(tmp_path, [1, 2])
    with bcp.CheckpointManager(tmp_path, keep=1) as manager:
        with pytest.raises(UnknownObjectError):
            manager.save(2, {"bad": lambda: None}, force=True)
        manager.save(3, _state(3.0), force=True)
    assert _names(tmp_path) == ["step-3"]


def test_nothing_is_removed_before_the_new_checkpoint_is_committed(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 2), keep=1)

    def fail(name: str, event: str) -> None:
        if name == "save.commit.before":
            raise OSError("the disk is gone")

    manager = bcp.CheckpointManager(tmp_path, cadence=1, keep=1)
    stop = telemetry.observe(fail)
    try:
        manager.save(2, _state(2.0))
        with pytest.raises(OSError, match="the disk is gone"):
            manager.wait()
    finally:
        stop()
    assert _names(tmp_path) == ["step-1"]
    assert manager.save(2, _state(2.0)) is not None, "the step that failed may be saved again"
    manager.close()
    assert _names(tmp_path) == ["step-2"]


def test_failing_to_remove_does_not_fail_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save_all(tmp_path, range(1, 2))

    delete = LocalBackend.delete

    def refuse(self: LocalBackend, keys: Any) -> None:
        if any(key.startswith("step-") for key in keys):
            raise StorageError("not today")
        delete(self, keys)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(LocalBackend, "delete", refuse)
        _save_all(tmp_path, range(2, 4), keep=1)
    assert "could not be removed: not today" in caplog.text
    assert _value(tmp_path) == 3.0


def test_what_cannot_be_removed_holds_up_no_other_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A regression: retention stopped there, for good. It is tried again after each save."""
    _save_all(tmp_path, range(1, 5))
    delete = LocalBackend.delete

    def refuse(self: LocalBackend, keys: Any) -> None:
        if any(key.startswith("step-1/") for key in keys):
            raise StorageError("not today")
        delete(self, keys)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(LocalBackend, "delete", refuse)
        _save_all(tmp_path, range(5, 8), keep=2)
    assert "step-1 could not be removed: not today" in caplog.text
    assert _names(tmp_path) == ["step-1", "step-6", "step-7"]
    _save_all(tmp_path, range(8, 9), keep=2)
    assert _names(tmp_path) == ["step-7", "step-8"]


def test_what_cannot_be_looked_at_holds_up_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save_all(tmp_path, range(1, 4))
    list_children = LocalBackend.list_children

    def refuse(self: LocalBackend, prefix: str = "") -> Sequence[str]:
        if prefix == "step-2/":
            raise StorageError("not today")
        return list_children(self, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "list_children", refuse)
        _save_all(tmp_path, range(4, 5), keep=1)
    assert _names(tmp_path) == ["step-2", "step-4"]
    _save_all(tmp_path, range(5, 6), keep=1)
    assert _names(tmp_path) == ["step-5"]


# -- failures are raised to the caller -------------------------------------------------------------------------------


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Saves stop before their commit until this is set."""
    event = threading.Event()
    stop = telemetry.observe(lambda name, _: event.wait(time_limit(60)) if name == "save.commit.before" else None)
    yield event
    event.set()
    stop()


def test_max_in_flight(tmp_path: Path, held: threading.Event) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1, job=bcp.JobOptions(max_in_flight=2)) as manager:
        first = manager.save(1, _state())
        second = manager.save(2, _state())
        assert first is not None
        assert second is not None
        assert not first.done()
        threading.Timer(0.2, held.set).start()
        third = manager.save(3, _state())
        assert first.done()
        assert third is not None
    assert _names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_skipping_when_busy(tmp_path: Path, held: threading.Event) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1, job=bcp.JobOptions(when_busy="skip")) as manager:
        first = manager.save(1, _state())
        assert first is not None
        assert manager.save(2, _state()) is None
        held.set()
        first.result()
        assert manager.save(3, _state()) is not None
    assert _names(tmp_path) == ["step-1", "step-3"]


def test_continuous_saves(tmp_path: Path, held: threading.Event) -> None:
    """A save begins whenever none runs, and a step that is a multiple waits for one that does."""
    cadence = bcp.Cadence(continuous=True, every_steps=4)
    with bcp.CheckpointManager(tmp_path, cadence=cadence, job={"max_in_flight": 2}) as manager:
        first = manager.save(1, _state())
        assert first is not None
        assert [manager.save(step, _state()) for step in (2, 3)] == [None, None]
        second = manager.save(4, _state())
        assert second is not None
        held.set()
        first.result()
        second.result()
        last = manager.save(5, _state())
        assert last is not None
        last.result()
    assert _names(tmp_path) == ["step-1", "step-4", "step-5"]


def test_continuous_saves_pause_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is down must not make each step of training copy the state."""
    with bcp.CheckpointManager(tmp_path, cadence=bcp.Cadence(continuous=True, every_steps=4)) as manager:
        assert isinstance(_fail_in_background(manager, 1).exception(), OSError)
        assert [manager.save(step, _state()) for step in (2, 3)] == [None, None]
        handle = manager.save(4, _state())
        assert handle is not None
        handle.result()
        monkeypatch.setattr(manager._coordinator, "_retry_time", 0.0)  # a minute later
        assert manager.save(5, _state()) is not None
    assert _names(tmp_path) == ["step-4", "step-5"]


def _fail_in_background(manager: bcp.CheckpointManager, step: int) -> bcp.SaveHandle:
    """Save, and wait until that has failed, without asking the handle for the outcome."""
    ended = threading.Event()

    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            raise OSError("a broken disk")

    stop = telemetry.observe(fail)
    try:
        handle = manager.save(step, _state())
        assert handle is not None
        handle.add_done_callback(lambda _: ended.set())
        assert ended.wait(time_limit(60))
    finally:
        stop()
    return handle


@pytest.mark.parametrize("how", ["wait", "close", "with"])
def test_a_failure_in_the_background_is_raised_at_the_end(tmp_path: Path, how: str) -> None:
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    _fail_in_background(manager, 1)
    calls = {"wait": manager.wait, "close": manager.close, "with": lambda: manager.__exit__(None, None, None)}
    with pytest.raises(OSError, match="a broken disk"):
        calls[how]()
    manager.close()  # what was raised is not raised again
    assert not (tmp_path / LEASE_KEY).exists()


def test_the_next_save_warns_of_a_failure_in_the_background(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        _fail_in_background(manager, 1)
        with pytest.warns(SaveFailedWarning, match=r"step-1 failed, .*: a broken disk"):
            handle = manager.save(2, _state(2.0))
        assert handle is not None
        handle.result()
        manager.save(3, _state(3.0))  # warns no more
    assert _value(tmp_path) == 3.0


def test_a_failure_in_the_background_after_which_no_save_is_committed(tmp_path: Path) -> None:
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    _fail_in_background(manager, 1)
    with pytest.warns(SaveFailedWarning, match="step-1 failed"):
        _fail_in_background(manager, 2)
    with pytest.raises(OSError, match="a broken disk"):
        manager.close()


def test_a_failure_in_the_background_is_not_missed_if_the_next_call_fails(tmp_path: Path) -> None:
    """A regression: it was forgotten, as if the caller had seen it."""
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    _fail_in_background(manager, 1)
    with pytest.raises(UsageError, match="is not a number"):
        manager.save(2, _state(2.0), metrics={"loss": "high"})  # type: ignore[dict-item]
    with pytest.raises(OSError, match="a broken disk"):
        manager.close()


def test_who_asked_for_the_outcome_is_not_warned(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        assert isinstance(_fail_in_background(manager, 1).exception(), OSError)
        handle = manager.save(1, _state(1.0))  # the same step
        assert handle is not None
        handle.result()
        failed = _fail_in_background(manager, 2)
        with pytest.raises(OSError, match="a broken disk"):
            failed.result()
    assert _value(tmp_path) == 1.0


def test_an_error_in_the_training_loop_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            raise OSError("a broken disk")

    def loop() -> None:
        with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
            manager.save(1, _state())
            raise ZeroDivisionError

    stop = telemetry.observe(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            loop()
    finally:
        stop()
    assert "step-1 failed: a broken disk" in caplog.text
    assert not (tmp_path / LEASE_KEY).exists()


def test_a_full_disk_is_detected_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend, "free_bytes", lambda self: 10)
    with (
        pytest.raises(StorageFullError, match=r"needs 32 bytes, but only 10 are free\. Nothing was written"),
        bcp.CheckpointManager(tmp_path, cadence=1) as manager,
    ):
        manager.save(1, _state())
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_saved_again_after_a_refused_save(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path) as manager:
        for state in ({"model": object()}, nn.Linear(1, 1), lambda: nn.Linear(1, 1)):
            with pytest.raises(UsageError):
                manager.save(1, state, force=True)  # type: ignore[arg-type]
        assert manager.save(1, _state(1.0), force=True) is not None
    assert _names(tmp_path) == ["step-1"]


def test_a_closed_manager_refuses_to_save(tmp_path: Path) -> None:
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    manager.close()
    manager.close()
    with pytest.raises(UsageError, match="is closed"):
        manager.save(1, _state())


@pytest.mark.parametrize(
    "arguments",
    [
        {"cadence": 0}, {"cadence": "10"}, {"keep": 0}, {"max_in_flight": 0}, {"when_busy": "drop"},
        {"coordinate_every_s": 0}, {"lease_s": 1e9}, {"layout": "round"},
        {"metadata": {"metrics": 1}}, {"metadata": {"f": print}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bcp.CheckpointManager(tmp_path, **managing(**arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"preemption": bcp.Preemption(signals=[signal.SIGKILL])},
        {"preemption": bcp.Preemption(signals=["TERM"])},  # type: ignore[list-item]
        {"cadence": bcp.Cadence(signals=[signal.SIGKILL])},
    ],
    ids=str,
)
def test_signals_that_cannot_be_handled(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bcp.CheckpointManager(tmp_path, **arguments).wait()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        with pytest.raises(UsageError, match="the metric 'loss' is not a number: 'small'"):
            manager.save(1, _state(), metrics={"loss": "small"})  # type: ignore[dict-item]
        for metrics in ({"loss": 10**400}, {1: 2.0}, {"": 2.0}, {"\ud800": 2.0}, [1.0]):
            with pytest.raises(UsageError, match="metric"):
                manager.save(1, _state(), metrics=metrics)  # type: ignore[arg-type]
        manager.save(1, _state(), metrics={"loss": torch.tensor(0.5)})  # type: ignore[dict-item]
    assert bcp.open(tmp_path / "step-1").metadata["metrics"] == {"loss": 0.5}


# -- resuming ------------------------------------------------------------------------------------------------------


def _data_file(root: Path, step: int) -> Path:
    return next((root / f"step-{step}").glob("attempt-*/model-*"))


def test_a_fresh_start_returns_none(tmp_path: Path) -> None:
    assert _value(tmp_path / "nowhere") is None
    with bcp.CheckpointManager(tmp_path) as manager:
        assert manager.latest() is None


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_checkpoint_instead_of_a_root_is_an_error(tmp_path: Path, *, is_committed: bool) -> None:
    _save_all(tmp_path, [1])
    step = tmp_path / "step-1"
    if not is_committed:
        (step / "manifest.msgpack").unlink()
    before = sorted(step.rglob("*"))
    expected = f"{re.escape(str(step))} is a checkpoint, .* pass {re.escape(str(tmp_path))} instead"
    with pytest.raises(UsageError, match=expected):
        bcp.latest(step)
    with pytest.raises(UsageError, match=expected):
        bcp.CheckpointManager(step).wait()
    assert sorted(step.rglob("*")) == before


@pytest.mark.parametrize("damage", ["manifest", "missing", "cut", "flipped"])
def test_falls_back_to_the_checkpoint_before(tmp_path: Path, damage: str) -> None:
    _save_all(tmp_path, range(1, 4))
    if damage == "manifest":
        (tmp_path / "step-3" / "manifest.msgpack").write_bytes(b"garbage")
    elif damage == "missing":
        _data_file(tmp_path, 3).unlink()
    elif damage == "cut":
        os.truncate(_data_file(tmp_path, 3), 4100)
    else:
        with _data_file(tmp_path, 3).open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff")
    assert _value(tmp_path) == 2.0


def test_no_valid_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 3))
    with _data_file(tmp_path, 2).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    _data_file(tmp_path, 1).unlink()
    with pytest.raises(NoValidCheckpointError, match=r"(?s)step-2: .*step-1: .*is missing.*allow_fresh=True"):
        _value(tmp_path)
    with bcp.CheckpointManager(tmp_path) as manager:
        assert manager.resume(_state(), allow_fresh=True) is None


def test_a_checkpoint_of_a_newer_library_causes_no_fallback(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 3))
    manifest = tmp_path / "step-2" / "manifest.msgpack"
    manifest.write_bytes(with_version(manifest.read_bytes(), 3))
    with pytest.raises(UnsupportedVersionError):
        bcp.latest(tmp_path)
    with bcp.CheckpointManager(tmp_path) as manager, pytest.raises(UnsupportedVersionError):
        manager.resume(_state())


def test_a_mismatch_causes_no_fallback(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 3))
    with bcp.CheckpointManager(tmp_path) as manager, pytest.raises(MismatchError):
        manager.resume({"model": nn.Linear(7, 7)})


# -- slow removals -------------------------------------------------------------------------------------------------


def test_a_save_does_not_wait_for_the_removal_of_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, go_on = threading.Event(), threading.Event()
    was_in_time: list[bool] = []
    delete = LocalBackend.delete

    def delete_slowly(self: LocalBackend, keys: Sequence[str]) -> None:
        if "step-1/manifest.msgpack" in keys:
            removing.set()
            was_in_time.append(go_on.wait(time_limit(10)))
        delete(self, keys)

    monkeypatch.setattr(LocalBackend, "delete", delete_slowly)
    with bcp.CheckpointManager(tmp_path, cadence=1, keep=1) as manager:
        manager.save(1, _state())
        manager.save(2, _state())
        assert removing.wait(time_limit(60))
        handle = manager.save(3, _state())
        assert handle is not None
        handle.result()
        go_on.set()
    assert was_in_time == [True]
    assert _names(tmp_path) == ["step-3"]


def test_a_save_waits_for_the_removal_of_its_own_name() -> None:
    cleaner = Cleaner()
    thread = threading.Thread(target=cleaner.expect, args=("step-1",))
    with cleaner.removing("step-1") as is_free:
        assert is_free
        thread.start()
        while not cleaner.is_expected("step-1"):
            pass
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(time_limit(60))
    assert not thread.is_alive()
    with cleaner.removing("step-1") as is_free:
        assert not is_free
    cleaner.forget("step-1")
    with cleaner.removing("step-1") as is_free:
        assert is_free


# -- other jobs ----------------------------------------------------------------------------------------------------


def _attempt(root: Path, step: int, job: bytes) -> Path:
    attempt = root / f"step-{step}" / attempt_name(new_attempt_id(job))
    attempt.mkdir(parents=True)
    (attempt / "model-00000.safetensors").write_text("half")
    return attempt


def test_unfinished_attempts_of_ended_jobs_are_removed(tmp_path: Path) -> None:
    _save_all(tmp_path, range(1, 2))
    dead = [_attempt(tmp_path, step, b"dead") for step in (1, 2, 3)]
    unknown = _attempt(tmp_path, 3, b"")
    elsewhere = tmp_path / "somewhere-4" / attempt_name(new_attempt_id(b"dead"))
    elsewhere.mkdir(parents=True)
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        own = _attempt(tmp_path, 4, manager._resources.lease.job)  # type: ignore[union-attr]
        assert all(attempt.exists() for attempt in dead), "nothing is removed before a new checkpoint is committed"
        manager.save(5, _state(5.0))
    assert not any(attempt.exists() for attempt in dead)
    assert not (tmp_path / "step-2").exists()
    assert unknown.exists()
    assert elsewhere.exists()
    assert own.exists()
    assert _value(tmp_path) == 5.0


def test_a_manager_does_nothing_before_it_is_used(tmp_path: Path) -> None:
    manager = bcp.CheckpointManager(tmp_path / "root", cadence=1)
    manager.request_save()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    manager.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="is closed"):
        manager.latest()


def test_a_second_job_on_the_same_root_is_refused(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, job=bcp.JobOptions(lease_s=6.0)):
        with pytest.raises(RootInUseError, match="this process already has a CheckpointManager open on"):
            bcp.CheckpointManager(tmp_path).wait()
        with bcp.CheckpointManager(tmp_path / "another"):
            pass


def test_a_root_that_cannot_be_leased_is_an_error(tmp_path: Path) -> None:
    for name, make in (("directory", Path.mkdir), ("link", lambda path: path.symlink_to("missing"))):
        (tmp_path / name).mkdir()
        make(tmp_path / name / LEASE_KEY)
        with pytest.raises(
            StorageError, match=r"lease\.msgpack.*(neither be read nor created.*remove it|link to .*remove the link)"
        ):
            bcp.CheckpointManager(tmp_path / name).wait()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_dropped_manager_releases_its_root(tmp_path: Path, held: threading.Event) -> None:
    # The next manager raises if it sees a heartbeat between the end of the save and the release.
    manager = bcp.CheckpointManager(tmp_path, cadence=1, job=bcp.JobOptions(lease_s=time_limit(1)))
    handle = manager.save(1, _state(1.0))
    assert handle is not None
    del manager
    with pytest.raises(RootInUseError, match="this process already has"):
        bcp.CheckpointManager(tmp_path).wait()  # a save is still in flight
    held.set()
    handle.result()
    with bcp.CheckpointManager(tmp_path):
        assert _names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("way", ["close", "exit"])
def test_an_interrupted_close_is_completed_by_the_next_one(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The second interrupt comes while everything is released. A regression: nothing released it later."""
    before = signal.getsignal(signal.SIGTERM)
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    handle = manager.save(1, _state(1.0))
    assert handle is not None
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "failure_of", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    with pytest.raises(UsageError, match="is closed"):
        manager.save(2, _state(2.0))
    held.set()
    if way == "close":
        manager.close()
    else:
        _release_at_exit(weakref.ref(manager._resources))
    assert handle.done()
    assert _names(tmp_path) == ["step-1"]
    assert not (tmp_path / LEASE_KEY).exists()
    assert signal.getsignal(signal.SIGTERM) == before


def _interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_a_job_that_lost_its_lease_cannot_save(tmp_path: Path, held: threading.Event) -> None:
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    manager.save(1, _state(1.0))
    (tmp_path / LEASE_KEY).unlink()
    with bcp.CheckpointManager(tmp_path, cadence=1) as other:
        held.set()
        with pytest.raises(RootInUseError, match="has taken this root over"):
            manager.wait()
        with pytest.raises(RootInUseError, match="has taken this root over"):
            manager.save(2, _state(2.0))
        manager.close()
        assert _names(tmp_path) == []
        other.save(3, _state(3.0))
    assert _names(tmp_path) == ["step-3"]


# -- signals -------------------------------------------------------------------------------------------------------


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    managers: list[bcp.CheckpointManager] = []

    def loop() -> None:
        with bcp.CheckpointManager(tmp_path, cadence=100) as manager:
            managers.append(manager)
            for step in range(1, 100):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.save(step, _state(1.0))

    with pytest.raises(SystemExit) as raised:
        loop()
    assert raised.value.code == 128 + signal.SIGTERM
    assert managers[0].preempted
    assert _names(tmp_path) == ["step-2"]
    assert _value(tmp_path) == 1.0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


PREEMPTION = bcp.Preemption(signals=[signal.SIGUSR2], action="return")


def test_on_sigterm_no_further_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace period is for the save. The next job removes the rest."""
    _save_all(tmp_path, range(1, 6))
    begun, go_on, remove = threading.Event(), threading.Event(), Housekeeping._remove

    def remove_slowly(self: Housekeeping, name: str) -> None:
        begun.set()
        assert go_on.wait(time_limit(60))
        remove(self, name)

    monkeypatch.setattr(Housekeeping, "_remove", remove_slowly)
    manager = bcp.CheckpointManager(tmp_path, cadence=1, keep=1, preemption=bcp.Preemption(action="return"))
    manager.save(6, _state(6.0))
    assert begun.wait(time_limit(60))
    os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(manager, "_finish_saves", lambda: None)
    handle = manager.save(7, _state(7.0))
    assert handle is not None
    handle.result(time_limit(60))  # although a removal is in progress
    go_on.set()
    manager.close()
    assert _names(tmp_path) == ["step-2", "step-3", "step-4", "step-5", "step-6", "step-7"]
    assert not (tmp_path / LEASE_KEY).exists()
    _save_all(tmp_path, range(8, 9), keep=1)
    assert _names(tmp_path) == ["step-8"]


def test_returning_after_a_preemption_signal(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, preemption=PREEMPTION) as manager:
        os.kill(os.getpid(), signal.SIGUSR2)
        step = 0
        while not manager.preempted:
            step += 1
            manager.save(step, _state())
    assert _names(tmp_path) == [f"step-{step}"]


def test_a_signal_that_requests_a_save(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=bcp.Cadence(signals=[signal.SIGUSR2])) as manager:
        manager.save(1, _state())
        os.kill(os.getpid(), signal.SIGUSR2)
        for step in range(2, 40):
            manager.save(step, _state())
    assert len(_names(tmp_path)) == 1
    assert not manager.preempted


def test_sigterm_does_not_save_the_same_step_again(tmp_path: Path) -> None:
    manager = bcp.CheckpointManager(tmp_path, cadence=1)
    manager.save(1, _state())
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        manager.save(1, _state())
    assert _names(tmp_path) == ["step-1"]


def test_a_manager_in_another_thread_warns_about_signals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        with bcp.CheckpointManager(tmp_path):
            pass

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "enter the manager in the main thread" in caplog.text


# -- the end of the interpreter ------------------------------------------------------------------------------------


def test_a_forked_worker_that_ends_does_not_affect_its_parent(tmp_path: Path) -> None:
    """A data loader's worker is forked while a save is in flight, and ends while that still is."""
    script = textwrap.dedent(
        """
        import multiprocessing, sys, threading
        import bytecheckpoint as bcp
        from bytecheckpoint import telemetry

        held = threading.Event()
        telemetry.observe(lambda name, event: held.wait(60) if name == "save.commit.before" else None)
        with bcp.CheckpointManager(sys.argv[1], cadence=1) as manager:
            handle = manager.save(1, {"extra_state": {"value": 1}})
            worker = multiprocessing.get_context("fork").Process(target=int)
            worker.start()
            worker.join(30)
            assert worker.exitcode == 0, worker.exitcode
            awake, report = multiprocessing.Pipe()
            sleeper = multiprocessing.get_context("fork").Process(
                target=lambda: (report.send("awake"), threading.Event().wait())
            )
            sleeper.start()
            awake.recv()
            sleeper.terminate()
            sleeper.join(30)
            assert sleeper.exitcode == -15, sleeper.exitcode
            assert not handle.done()
            held.set()
        """
    )
    done = warm_python().run(["-W", "ignore", "-c", script, str(tmp_path)], timeout=time_limit(120))
    assert done.returncode == 0, done.stderr
    assert _names(tmp_path) == ["step-1"]


def test_a_manager_that_was_not_closed_finishes_its_saves(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch, bytecheckpoint as bcp
        manager = bcp.CheckpointManager(sys.argv[1], cadence=1, keep=1)
        for step in (1, 2):
            manager.save(step, {"extra_state": {"value": step, "tensor": torch.ones(1000)}})
        """
    )
    done = warm_python().run(["-c", script, str(tmp_path)], timeout=time_limit(120))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert _names(tmp_path) == ["step-2"]
    assert not (tmp_path / LEASE_KEY).exists()


def _run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["-W", "ignore", "-c", textwrap.dedent(script), *map(str, arguments)]
    return warm_python().run(command, timeout=time_limit(60))


def test_a_manager_that_was_dropped_does_not_keep_the_process(tmp_path: Path) -> None:
    """The root is released at exit, although the heartbeat comes only every 300 s."""
    script = """
        import sys, torch, bytecheckpoint as bcp
        bcp.CheckpointManager(sys.argv[1], job=bcp.JobOptions(lease_s=900.0)).wait()
        manager = bcp.CheckpointManager(sys.argv[1] + "/other", cadence=1, job=bcp.JobOptions(lease_s=900.0))
        manager.save(1, {"extra_state": {"value": 1}})
        del manager
"""
    done = _run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert _names(tmp_path / "other") == ["step-1"]
    assert not list(tmp_path.rglob(LEASE_KEY))


def test_a_manager_that_was_dropped_lets_signals_through(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, bytecheckpoint as bcp
        bcp.CheckpointManager(sys.argv[1]).wait()
        os.kill(os.getpid(), signal.SIGTERM)
        print("survived", flush=True)
        """
    done = _run(script, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stdout + done.stderr


def test_a_forked_child_cannot_wait_for_its_parent(tmp_path: Path) -> None:
    script = """
        import os, sys, threading
        import bytecheckpoint as bcp
        from bytecheckpoint import telemetry
        from bytecheckpoint.errors import UsageError

        held = threading.Event()
        telemetry.observe(lambda name, event: held.wait(60) if name == "save.commit.before" else None)
        state = {"model": {"w": __import__("torch").ones(3)}}
        checkpointer = bcp.Checkpointer()
        with bcp.CheckpointManager(sys.argv[1], cadence=1, checkpointer=checkpointer) as manager:
            handle = manager.save(1, state)
            child = os.fork()
            if child == 0:
                calls = [
                    handle.result, handle.exception, handle.staged, handle.wait_staged, manager.wait, manager.latest,
                    lambda: handle.add_done_callback(print), lambda: manager.save(2, state),
                    lambda: manager.resume(state),
                    lambda: checkpointer.save(sys.argv[1] + "/a", state), lambda: checkpointer.load("a", state),
                ]
                refused = 0
                for call in calls:
                    try:
                        call()
                    except UsageError as error:
                        refused += 1
                manager.close()
                assert not handle.done()
                os._exit(0 if refused == len(calls) else 1)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            held.set()
        opened = bcp.open(sys.argv[1] + "/step-1")
        opened["model.w"].load()
        child = os.fork()
        if child == 0:
            os._exit(0 if opened["model.w"].load().tolist() == [1, 1, 1] else 1)
        assert os.waitpid(child, 0)[1] == 0
        """
    done = _run(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
