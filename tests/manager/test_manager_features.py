"""Milestones, the best checkpoint, names of folders, and callbacks of ``CheckpointManager``."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import UsageError
from bytecheckpoint.saving.handle import SaveResult
from bytecheckpoint.testing import time_limit


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), value)}, "extra_state": {"value": value}}


def _names(root: Path) -> list[str]:
    """The committed checkpoints."""
    return sorted(path.parent.name for path in root.glob("step-*/manifest.msgpack"))


def test_milestones_are_kept_for_ever_and_found_by_name(tmp_path: Path) -> None:
    for first in (1, 5):  # the second job reads from the manifests what the first one saved
        with bcp.CheckpointManager(tmp_path, cadence=1, keep=1) as manager:
            for step in range(first, first + 4):
                manager.save(step, _state(float(step)), milestone="stage 1" if step in (2, 5) else None)
            assert manager.milestone("nothing") is None
    assert _names(tmp_path) == ["step-2", "step-5", "step-8"]
    with bcp.CheckpointManager(tmp_path) as manager:
        found = manager.milestone("stage 1")
        assert found is not None
        assert found.step == 5
        for name, why in ((9, "must be a string"), ("", "must be a string"), ("\ud800", "cannot be stored")):
            with pytest.raises(UsageError, match=f"milestone {why}"):
                manager.save(9, _state(), milestone=name)  # type: ignore[arg-type]
    assert bcp.open(tmp_path / "step-2").metadata == {"milestone": "stage 1"}


@pytest.mark.parametrize("is_new_job", [False, True])
def test_a_milestone_that_is_saved_again_remains_one(tmp_path: Path, is_new_job: bool) -> None:
    with bcp.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, _state(1.0), milestone="stage 1")
        if not is_new_job:
            manager.save(1, _state(2.0), force=True)
    with bcp.CheckpointManager(tmp_path, keep=1) as manager:
        if is_new_job:
            manager.save(1, _state(2.0), force=True)
        manager.save(2, _state(3.0), force=True)
        found = manager.milestone("stage 1")
        assert found is not None
        assert found.section_values("extra_state")[("value",)] == 2.0
        manager.save(1, _state(4.0), milestone="stage 2")
        manager.wait()
        assert manager.milestone("stage 1") is None


@given(
    losses=st.lists(st.one_of(st.none(), st.just(math.nan), st.integers(-3, 3)), min_size=1, max_size=8),
    mode=st.sampled_from(["min", "max"]),
    where=st.sampled_from(["metrics", "metadata"]),
)
@settings(max_examples=examples(25, 25), deadline=None)
def test_best_equals_brute_force(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float | None], mode: Any, where: str
) -> None:
    root = tmp_path_factory.mktemp("best")
    for step, loss in enumerate(losses):
        metadata = {} if loss is None else {"loss": loss} if where == "metadata" else {"metrics": {"loss": loss}}
        bcp.save(root / f"step-{step}", {"extra_state": {"value": step}}, step=step, metadata=metadata)
    measured = [(loss, step) for step, loss in enumerate(losses) if loss is not None and not math.isnan(loss)]
    expected = None
    if measured:
        extreme = (min if mode == "min" else max)(loss for loss, _ in measured)
        expected = max(step for loss, step in measured if loss == extreme)
    with bcp.CheckpointManager(root, keep=bcp.Retention(best=1, metric="loss", mode=mode)) as manager:
        best, named, other = manager.best(), manager.best("loss", mode), manager.best("accuracy")
    assert (None if best is None else best.step) == (None if named is None else named.step) == expected
    assert other is None


def test_best_needs_a_metric(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(UsageError, match="needs a metric"):
            manager.best()
        with pytest.raises(UsageError, match="mode"):
            manager.best("loss", "least")  # type: ignore[arg-type]
        assert manager.best("loss") is None


@pytest.mark.parametrize(("template", "newest"), [("checkpoint-{step}", "checkpoint-12"), ("{step:08d}", "00000012")])
def test_names_of_folders(tmp_path: Path, template: str, newest: str) -> None:
    bcp.save(tmp_path / "step-1", _state())
    with bcp.CheckpointManager(tmp_path, cadence=1, keep=1, job=bcp.JobOptions(name_template=template)) as manager:
        for step in (9, 10, 12):
            manager.save(step, _state(float(step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([newest, "step-1"])
    state = _state(-1.0)
    with bcp.CheckpointManager(tmp_path, job=bcp.JobOptions(name_template=template)) as manager:
        assert manager.resume(state) is not None
    assert state["extra_state"]["value"] == 12.0


@pytest.mark.parametrize(
    "template", ["step", "{step}-x", "a/{step}", "1{step}", "{step}{step}", "{0}", "{other}", "{step:x}", "../{step}",
                 5, "attempt-{step}", ".bcp-tmp-{step}", "{step!r:>8}", ""]
)  # fmt: skip
def test_names_that_do_not_work(tmp_path: Path, template: Any) -> None:
    with pytest.raises(UsageError, match="name_template must be"):
        bcp.CheckpointManager(tmp_path, job=bcp.JobOptions(name_template=template))
    assert list(tmp_path.iterdir()) == []


def test_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[str, object]] = []
    ended = threading.Event()

    def committed(result: SaveResult) -> None:
        calls.append(("committed", result.step))
        if result.step == 3:
            ended.set()
        raise ZeroDivisionError("in a callback")

    callbacks = bcp.Callbacks(
        on_staged=lambda handle: calls.append(("staged", Path(handle.url).name)),
        on_committed=committed,
        on_failed=lambda handle, error: calls.append((f"failed {Path(handle.url).name}", str(error))),
        on_removed=lambda url: calls.append(("removed", Path(url).name)),
    )

    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            raise OSError("a broken disk")

    with bcp.CheckpointManager(tmp_path, cadence=1, keep=1, callbacks=callbacks) as manager:
        manager.save(1, _state())
        manager.wait()
        stop = telemetry.observe(fail)
        manager.save(2, _state())
        with pytest.raises(OSError, match="a broken disk"):
            manager.wait()
        stop()
        manager.save(3, _state())
    assert ended.wait(time_limit(60))  # results are available before the callbacks are called
    staged = [what for kind, what in calls if kind == "staged" and what != "step-2"]  # that may have failed before
    assert staged == ["step-1", "step-3"]
    assert [call for call in calls if call[0] not in ("staged", "removed")] == [
        ("committed", 1), ("failed step-2", "a broken disk"), ("committed", 3),
    ]  # fmt: skip
    assert [call for call in calls if call[0] == "removed"] == [("removed", "step-1")]
    assert "in a callback" in caplog.text
    with pytest.raises(UsageError, match="on_staged must be a function"):
        bcp.Callbacks(on_staged=5)  # type: ignore[arg-type]
