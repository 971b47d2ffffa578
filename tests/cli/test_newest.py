"""Which checkpoint of a root is the newest one, for everything that asks for it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import discovery
from bytecheckpoint.checkpoint.location import Location
from bytecheckpoint.errors import NoValidCheckpointError


def _save(root: Path, **steps: int) -> None:
    for name, step in steps.items():
        bcp.save(root / name, {"extra_state": {"name": name}}, step=step)


def _newest(root: Path) -> str | None:
    found = bcp.latest(root)
    return None if found is None else Path(found.url).name


FOREIGN_NAMES = [
    ({"step-500-seed-1": 500, "step-100-seed-2": 100}, "step-500-seed-1"),
    ({"restart-30": 10, "2026-11-25": 1000}, "2026-11-25"),
    ({"run-1": 300, "run-2": 200, "run-3": 100}, "run-1"),
    ({"step-9": 9, "step-10": 10, "best": 8}, "step-10"),
    ({"checkpoint-00000009": 9, "step-10": 10, "step-2": 2}, "step-10"),
]


@pytest.mark.parametrize(("steps", "newest"), FOREIGN_NAMES)
def test_the_stored_step_decides_and_not_the_name(
    tmp_path: Path, bcp_command: Callable[..., Any], steps: dict[str, int], newest: str
) -> None:
    """Whatever asks for the newest checkpoint gets the same one."""
    _save(tmp_path, **steps)
    assert _newest(tmp_path) == newest
    with bcp.CheckpointManager(tmp_path) as manager:
        extra = {"name": ""}
        assert manager.resume({"extra_state": extra}) is not None
        assert extra["name"] == newest
    watched = [Path(one.url).name for one in bcp.watch(tmp_path, poll_s=0.01, timeout_s=0.01, include_existing=True)]
    assert watched == sorted(steps, key=lambda name: steps[name])
    assert bcp_command("ls", tmp_path, "--json").json["latest"] == newest


@pytest.mark.parametrize("steps", [{"a": 1, "b": 3, "c": 2}, {"step-10": 10, "step-5": 50, "x-7": 7}])
@pytest.mark.parametrize("damaged", [False, True])
def test_ls_marks_what_latest_returns(
    tmp_path: Path, bcp_command: Callable[..., Any], steps: dict[str, int], *, damaged: bool
) -> None:
    _save(tmp_path, **steps)
    newest = _newest(tmp_path)
    assert newest is not None
    if damaged:
        for path in (tmp_path / newest).glob("*/*"):
            path.unlink()
    assert bcp_command("ls", tmp_path, "--json").json["latest"] == _newest(tmp_path)


def test_of_equal_steps_the_one_that_was_saved_last(tmp_path: Path) -> None:
    _save(tmp_path, zebra=5, aardvark=5)
    assert _newest(tmp_path) == "aardvark"


def test_names_that_are_steps_are_not_all_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A search that opened the others would warn about them."""
    _save(tmp_path, **{"step-100": 100})
    for step in range(20):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "manifest.msgpack").write_bytes(b"garbage")
    assert _newest(tmp_path) == "step-100"
    assert not caplog.records


def test_a_save_in_progress_is_no_invalid_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(tmp_path, **{"step-1": 1})
    (tmp_path / "step-2" / "attempt-x").mkdir(parents=True)
    (tmp_path / "step-2" / "attempt-x" / "model-00000.safetensors").write_text("half")
    assert _newest(tmp_path) == "step-1"
    assert not caplog.records


@pytest.mark.parametrize("remains", ["nothing", "files"])
@pytest.mark.parametrize("search", ["latest", "best"])
def test_a_checkpoint_that_is_replaced_after_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remains: str, search: str
) -> None:
    """A job that keeps one checkpoint commits the next one, and removes what was listed, before it is opened."""
    _save(tmp_path, **{"step-1": 1})
    open_nearest = discovery.open_nearest

    def opened_late(location: Location, deadline_s: float) -> Any:
        if location.url.endswith("step-1"):
            bcp.save(tmp_path / "step-2", {"extra_state": {}}, step=2, metadata={"loss": 1.0})
            if remains == "nothing":
                shutil.rmtree(tmp_path / "step-1")
            else:
                (tmp_path / "step-1" / "manifest.msgpack").unlink(missing_ok=True)
        return open_nearest(location, deadline_s)

    monkeypatch.setattr(discovery, "open_nearest", opened_late)
    root = Location(tmp_path)
    found = discovery.find_newest(root) if search == "latest" else discovery.find_best(root, "loss", "min")
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("file", ["trainer_state.json", ".metadata", "mp_rank_00_model_states.pt"])
def test_checkpoints_of_other_systems_are_no_fresh_start(tmp_path: Path, file: str) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / file).write_bytes(b"x")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"a model that was downloaded")
    with pytest.raises(NoValidCheckpointError, match=rf"(?s)checkpoint-500: another system .*{file}.*by its path"):
        bcp.latest(tmp_path)
    assert bcp.latest(tmp_path, allow_fresh=True) is None
    _save(tmp_path, **{"step-1": 1})
    assert _newest(tmp_path) == "step-1"
    shutil.rmtree(tmp_path / "step-1")
    shutil.rmtree(tmp_path / "checkpoint-500")
    assert bcp.latest(tmp_path) is None


def test_metrics_that_are_no_numbers(tmp_path: Path, bcp_command: Callable[..., Any]) -> None:
    metrics = {"nan": math.nan, "text": "1", "flag": True, "loss": 2}
    bcp.save(tmp_path / "a", {"extra": {"x": 1}}, step=1, metadata={"metrics": metrics, "nan": 5.0, "score": 7})
    assert bcp_command("ls", tmp_path, "--json").json["entries"][0]["metrics"] == {"loss": 2.0}
    found = bcp.open(tmp_path / "a").manifest
    assert [discovery.metric_of(found, name) for name in ("nan", "flag", "loss", "score")] == [None, None, 2.0, 7.0]
