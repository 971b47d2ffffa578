"""Going back to an earlier step, with ``bcp rollback`` or in a job: abandoned checkpoints are not the newest."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.lineage import ROLLBACK_KEY, Abandoned
from bytecheckpoint.errors import FormatError, NoValidCheckpointError
from bytecheckpoint.manager import housekeeping
from bytecheckpoint.testing import time_limit

Command = Callable[..., Any]


def _save(root: bcp.Location | Path, *steps: int, of: str = "first", **options: Any) -> None:
    with bcp.CheckpointManager(root, cadence=1, **options) as manager:
        for step in steps:
            manager.save(step, {"extra_state": {"step": step, "of": of}})


def _resumed(root: bcp.Location | Path) -> tuple[int, str]:
    """The step from which a new job resumes, and the job that saved it."""
    extra = {"step": -1, "of": ""}
    with bcp.CheckpointManager(root) as manager:
        manager.resume({"extra_state": extra})
    return extra["step"], extra["of"]  # type: ignore[return-value]


def _names(root: Path) -> list[str]:
    return sorted((path.parent.name for path in root.glob("*/manifest.msgpack")), key=lambda name: int(name[5:]))


def test_a_job_that_goes_back_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture, bcp_command: Command) -> None:
    _save(tmp_path, 7, 8, 9, 10)
    bcp.save(tmp_path / "other", {"extra_state": {}}, step=11)  # it was the newest, too
    assert not caplog.records
    assert not (tmp_path / ROLLBACK_KEY).exists()
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        extra = {"step": 0, "of": ""}
        bcp.load(manager.root.join("step-8"), {"extra_state": extra})
        manager.save(9, {"extra_state": {"step": 9, "of": "second"}})
        manager.wait()
        assert "step 9 is saved after steps that are higher" in caplog.text
        assert "step-10, other are abandoned" in caplog.text
    assert _resumed(tmp_path) == (9, "second")
    assert bcp_command("latest", tmp_path).stdout.strip() == str(tmp_path / "step-9")
    listed = bcp_command("ls", tmp_path, "--json").json
    assert listed["latest"] == "step-9"
    assert {one["name"] for one in listed["entries"] if one["abandoned"]} == {"step-10", "other"}
    assert "step-10: abandoned" in bcp_command("ls", tmp_path).stdout
    _save(tmp_path, 10, of="second")
    assert _resumed(tmp_path) == (10, "second")
    assert bcp.open(tmp_path / "other").step == 11


def test_a_job_that_goes_back_while_it_runs(tmp_path: Path) -> None:
    _save(tmp_path, 7, 8, 9, 10, 8, 9, job={"max_in_flight": 3})
    assert _resumed(tmp_path) == (9, "first")
    _save(tmp_path, 5, of="second")
    assert _resumed(tmp_path) == (5, "second")


def test_retention_removes_abandoned_checkpoints_first(tmp_path: Path) -> None:
    """So that a job that keeps two can still fall back to the one before its last."""
    _save(tmp_path, 7, 8, 10)
    _save(tmp_path, 9, keep=2)
    assert _names(tmp_path) == ["step-8", "step-9"]
    _save(tmp_path, 9, 10)
    assert bcp.latest(tmp_path).step == 10  # type: ignore[union-attr]
    _save(tmp_path, 3, keep=bcp.Retention(last=1, every_steps=10))
    assert _names(tmp_path) == ["step-3"]


def test_a_save_that_begins_while_retention_looks_at_what_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is replaced must not get the place of the later save, or what was saved between would be the oldest."""
    find, follow = housekeeping.find_manifest, housekeeping.Housekeeping.follow
    is_armed, looked, begun = threading.Event(), threading.Event(), threading.Event()

    def find_slowly(folder: Any) -> Any:
        found = find(folder)
        if is_armed.is_set() and folder.url.endswith("step-4"):
            looked.set()
            assert begun.wait(time_limit(60))
        return found

    def follow_and_signal(self: Any, save: Any, saved: Any) -> None:
        follow(self, save, saved)
        if looked.is_set():
            begun.set()

    monkeypatch.setattr(housekeeping, "find_manifest", find_slowly)
    monkeypatch.setattr(housekeeping.Housekeeping, "follow", follow_and_signal)
    _save(tmp_path, 5, 6)
    with bcp.CheckpointManager(tmp_path, cadence=1, keep=3) as manager:
        manager.save(4, {"extra_state": {}})
        manager.wait()
        manager._resources.housekeeping._thread.submit(int).result()
        is_armed.set()
        manager.save(2, {"extra_state": {}})
        assert looked.wait(time_limit(60))
        is_armed.clear()
        manager.save(4, {"extra_state": {}})
    assert _names(tmp_path) == ["step-2", "step-4", "step-6"]


def test_bcp_rollback(tmp_path: Path, bcp_command: Command) -> None:
    _save(tmp_path, 7, 8, 9, 10)
    ran = bcp_command("rollback", tmp_path, 8, "--json")
    assert (ran.code, ran.json["name"], ran.json["abandoned"]) == (0, "step-8", ["step-9", "step-10"])
    assert _resumed(tmp_path) == (8, "first")
    assert _resumed(tmp_path) == (8, "first")  # a restart
    assert [one.step for one in bcp.watch(tmp_path, poll_s=0.01, timeout_s=0.01, include_existing=True)] == [7, 8]
    _save(tmp_path, 9, of="second")
    assert _resumed(tmp_path) == (9, "second")
    assert "step-10 is the newest" in bcp_command("rollback", tmp_path, 10).stdout  # taken back
    assert _resumed(tmp_path) == (10, "first")


def test_what_bcp_rollback_refuses(tmp_path: Path, bcp_command: Command) -> None:
    ran = bcp_command("rollback", tmp_path, 8)
    assert (ran.code, "no checkpoints below" in ran.stderr) == (3, True)
    _save(tmp_path, 7, 8, 9)
    ran = bcp_command("rollback", tmp_path, 5)
    assert (ran.code, "there are: 7, 8, 9" in ran.stderr) == (3, True)
    assert bcp_command("rollback", tmp_path / "step-7", 7).code == 2
    next((tmp_path / "step-7").glob("attempt-*/*")).unlink()
    assert bcp_command("rollback", tmp_path, 7).code == 4
    with bcp.CheckpointManager(tmp_path) as manager:
        manager.wait()
        ran = bcp_command("rollback", tmp_path, 8)
        assert (ran.code, "already has a CheckpointManager" in ran.stderr) == (6, True)
    assert not (tmp_path / ROLLBACK_KEY).exists()
    assert _resumed(tmp_path) == (9, "first")


def test_only_abandoned_checkpoints_are_no_fresh_start(tmp_path: Path, bcp_command: Command) -> None:
    _save(tmp_path, 8, 9)
    assert bcp_command("rollback", tmp_path, 8).code == 0
    shutil.rmtree(tmp_path / "step-8")
    with pytest.raises(NoValidCheckpointError, match=r"step-9: a rollback has abandoned it; .*bcp rollback .* 9"):
        bcp.latest(tmp_path)
    assert bcp.latest(tmp_path, allow_fresh=True) is None


def test_a_root_is_its_own_history(tmp_path: Path, bcp_command: Command) -> None:
    """What is abandoned in one root is a checkpoint like any other at a new path; a copied root is equivalent."""
    _save(tmp_path / "run", 8, 9)
    assert bcp_command("rollback", tmp_path / "run", 8).code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert bcp.latest(tmp_path / "copy").step == 8  # type: ignore[union-attr]
    shutil.copytree(tmp_path / "run" / "step-9", tmp_path / "other" / "step-9")
    assert bcp.latest(tmp_path / "other").step == 9  # type: ignore[union-attr]
    assert bcp_command("copy", tmp_path / "run" / "step-9", tmp_path / "run" / "again").code == 0
    assert bcp.latest(tmp_path / "run").url.endswith("again")  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"\x82\xa9abandoned\x91\x01\xa9rollbacks\x01"])
def test_a_damaged_record_is_an_error(tmp_path: Path, content: bytes) -> None:
    _save(tmp_path, 8)
    (tmp_path / ROLLBACK_KEY).write_bytes(content)
    with pytest.raises(FormatError, match=r"rollback\.msgpack is damaged.*Remove this file"):
        bcp.latest(tmp_path)


@pytest.mark.parametrize("include_existing", [True, False])
def test_watch_yields_a_step_again_that_replaces_an_abandoned_one(tmp_path: Path, include_existing: bool) -> None:
    _save(tmp_path, 8, 9, 10)
    seen: list[int | None] = []
    actions = iter([lambda: None, lambda: _save(tmp_path, 9), lambda: None, lambda: _save(tmp_path, 10)])

    def stop() -> bool:
        """Called before every look at the root, and after every checkpoint."""
        if not include_existing or len(seen) >= 3:
            next(actions, lambda: None)()
        return 10 in seen[3 if include_existing else 0 :]

    for checkpoint in bcp.watch(tmp_path, poll_s=0.001, include_existing=include_existing, stop=stop):
        seen.append(checkpoint.step)
    assert seen == ([8, 9, 10, 10] if include_existing else [10])


def test_a_job_with_a_tier_goes_back(tmp_path: Path) -> None:
    root = bcp.Location(tmp_path / "store", tier=bcp.Tier(tmp_path / "tier", keep=3))
    _save(root, 8, 9, 10)
    _save(root, 9, of="second")
    record = tmp_path / "store" / ROLLBACK_KEY
    (staged,) = (tmp_path / "tier").rglob(ROLLBACK_KEY)
    assert staged.read_bytes() == record.read_bytes()
    record.unlink()  # as if the store had not answered then
    assert _resumed(root) == (9, "second")
    _save(root, 10, 11, of="second")
    assert record.read_bytes() == staged.read_bytes()
    assert Abandoned.decode(record.read_bytes(), "").count == 1
    assert bcp.latest(tmp_path / "store").step == 11  # type: ignore[union-attr]
