"""Incremental saves to a tier: what an older checkpoint in the store has is neither staged nor uploaded."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sorted_arguments import saving
from tier_faults import failing_uploads

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import attempts
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import finish_upload, remove, unfinished_uploads
from bytecheckpoint.errors import StorageError
from bytecheckpoint.saving import incremental
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.transfer.journal import find_journals

pytestmark = pytest.mark.sampled(7, of=__name__)

WAIT_S = time_limit(60)
SIZE = 1_500_000  # several chunks, and several parts


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests() -> None:
    session_of().engine.shared.last_commit = None


def state(step: int) -> dict[str, Any]:
    """The base is frozen; the adapter changes in every step."""
    base = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return {"model": {"base": base, "adapter": torch.full((5000,), float(step))}, "extra_state": {"step": step}}


def check(path: Any, step: int) -> bcp.LoadReport:
    loaded = {"model": {"base": torch.zeros(SIZE), "adapter": torch.zeros(5000)}, "extra_state": {"step": -1}}
    report = bcp.load(path, loaded)
    expected = state(step)
    assert loaded["extra_state"] == expected["extra_state"]
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in expected["model"].items())
    return report


class Places:
    """A store and a tier, both local."""

    def __init__(self, tmp_path: Path) -> None:
        self.store, self.tier = tmp_path / "store", tmp_path / "tier"

    def path(self, step: int) -> Path:
        return self.store / f"step-{step}"

    def location(self, step: int) -> bcp.Location:
        return bcp.Location(self.path(step), tier=bcp.Tier(self.tier))

    def staged(self, step: int) -> Path:
        return self.tier / "file" / str(self.store).lstrip("/") / f"step-{step}"

    def save(self, step: int, **options: Any) -> bcp.SaveHandle:
        return bcp.save(
            self.location(step),
            state(step),
            step=step,
            **saving(base="auto", **options),
        )

    def objects(self, step: int) -> Path:
        """The files in the store that the save of this step wrote."""
        return self.store / "objects" / bcp.open(self.location(step)).manifest.attempt

    def staged_objects(self, step: int) -> Path:
        return self.staged(step).parent / "objects" / self.objects(step).name


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fail_upload(places: Places, step: int, at: str = "transfer") -> None:
    with failing_uploads(at), pytest.raises(StorageError, match="the store is broken"):
        places.save(step).uploaded(WAIT_S)


@pytest.mark.parametrize("codec", [None, "zstd-planes"])
@pytest.mark.parametrize("is_async", [False, True])
def test_only_what_changed_is_staged_and_uploaded(places: Places, is_async: bool, codec: str | None) -> None:
    for step in (1, 2, 3):
        handle = places.save(step, async_save=is_async, options=bcp.SaveOptions(codec=codec))
        handle.uploaded(WAIT_S)
    assert nbytes(places.objects(1)) > SIZE
    for step in (2, 3):
        assert nbytes(places.objects(step)) < 100_000
        assert nbytes(places.staged_objects(step)) < 100_000
    assert bcp.open(places.path(3)).manifest.references.name == bcp.open(places.path(2)).manifest.references.name
    for step in (1, 2, 3):
        assert bcp.open(places.path(step)).verify().ok
        check(places.path(step), step)
        check(places.location(step), step)


def test_the_base_is_read_once(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of the base records what it has committed, so the next save does not search for it."""
    places.save(1).uploaded(WAIT_S)
    monkeypatch.setattr(incremental, "find_newest", lambda *a, **k: pytest.fail("it searches"))
    assert places.save(2).result().bytes_written < 100_000


def test_a_save_before_the_first_upload_writes_everything(places: Places) -> None:
    with failing_uploads("transfer"):
        first = places.save(1)
        second = places.save(2)
        with pytest.raises(StorageError):
            second.uploaded(WAIT_S)
    assert first.result().bytes_written == second.result().bytes_written > SIZE


def test_a_committed_checkpoint_that_is_not_uploaded_loads(places: Places) -> None:
    places.save(1).uploaded(WAIT_S)
    fail_upload(places, 2)
    assert not (places.path(2) / "manifest.msgpack").exists()
    newest = bcp.latest(bcp.Location(places.store, tier=bcp.Tier(places.tier)))
    assert newest is not None
    assert newest.step == 2
    check(places.location(2), 2)


@pytest.mark.parametrize("at", ["transfer", "commit"])
def test_a_failed_upload_is_continued(places: Places, at: str) -> None:
    places.save(1).uploaded(WAIT_S)
    fail_upload(places, 2, at)
    shutil.rmtree(places.path(1))  # which takes nothing from others
    (upload,) = unfinished_uploads(str(places.tier))
    assert finish_upload(upload).files == 3
    assert not [*find_journals(places.staged(2))]
    check(places.path(2), 2)
    remove(places.path(2))
    assert not [path for path in places.store.rglob("*") if path.is_file()]


def test_an_upload_whose_base_is_gone_is_given_up(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    places.save(1).uploaded(WAIT_S)
    fail_upload(places, 2)
    remove(places.path(1))
    with caplog.at_level(logging.WARNING, "bytecheckpoint.transfer"):
        done = CliRunner().invoke(cli, ["upload", str(places.tier)], catch_exceptions=False)
    assert done.output == f"{places.path(2)}: nothing was uploaded\n"
    assert f"is not uploaded: {places.path(2)} is not committed: 1 of its files are missing" in caplog.text
    assert unfinished_uploads(str(places.tier)) == []
    assert not [path for path in places.store.rglob("*") if path.is_file()]
    assert bcp.latest(bcp.Location(places.store, tier=bcp.Tier(places.tier))) is None
    session_of().engine.shared.last_commit = None
    assert places.save(3).result().bytes_written > SIZE


def test_a_later_checkpoint_is_at_the_path(places: Places) -> None:
    """The upload is discarded."""
    places.save(1).uploaded(WAIT_S)
    fail_upload(places, 2)
    bcp.save(places.path(2), {"other": torch.ones(5)}, step=2)
    assert finish_upload(*unfinished_uploads(str(places.tier))) is None
    assert [path.name for path in (places.store / "objects").iterdir()] == [places.objects(1).name]


def test_the_base_is_removed_during_the_upload(places: Places) -> None:
    """The store never has a checkpoint that refers to files that are not there, and the next save writes everything."""
    places.save(1).uploaded(WAIT_S)

    def observe(name: str, event: str) -> None:
        if (name, event) == ("upload.commit", "enter"):
            remove(places.path(1))

    stop = telemetry.observe(observe)
    try:
        with pytest.raises(StorageError, match="another program removed them"):
            places.save(2).uploaded(WAIT_S)
    finally:
        stop()
    assert not (places.path(2) / "manifest.msgpack").exists()
    with pytest.raises(bcp.errors.NoValidCheckpointError):
        bcp.latest(places.store)
    places.save(3).uploaded(WAIT_S)
    check(places.path(3), 3)


def test_overwritten_in_place(places: Places) -> None:
    """The checkpoint at the path is the base of the one that replaces it."""
    for step in (1, 2, 3):
        handle = bcp.save(
            bcp.Location(places.path(1), tier=bcp.Tier(places.tier)),
            state(step),
            step=step,
            options=bcp.SaveOptions(base="auto"),
        )
        handle.uploaded(WAIT_S)
        assert (handle.result().bytes_written > SIZE) == (step == 1)
        check(places.path(1), step)
        check(places.location(1), step)
    remove(places.path(1))
    assert not [path for path in places.store.rglob("*") if path.is_file()]


def test_retention_in_both_tiers(places: Places) -> None:
    """The store keeps the files of removed checkpoints that others need, and the folder only the newest checkpoint."""
    with bcp.CheckpointManager(
        bcp.Location(places.store, tier=bcp.Tier(places.tier)), keep=2, save=bcp.SaveOptions(base="auto")
    ) as manager:
        for step in range(1, 6):
            manager.save(step, state(step), force=True)
            manager.wait()
    assert nbytes(places.store) < 1.1 * 4 * SIZE
    assert not (places.path(1) / "manifest.msgpack").exists()
    assert sorted(child.name for child in places.staged(5).parent.iterdir()) == ["objects", "step-5"]
    assert [child.name for child in places.staged_objects(5).parent.iterdir()] == [places.objects(5).name]
    for step in (4, 5):
        check(places.path(step), step)
        check(places.location(step), step)


def leave_an_upload(places: Places) -> None:
    """A job saves steps 1 and 2, and cannot upload step 2."""
    with bcp.CheckpointManager(
        bcp.Location(places.store, tier=bcp.Tier(places.tier)), keep=1, save=bcp.SaveOptions(base="auto")
    ) as manager:
        manager.save(1, state(1), force=True)
        manager.wait()
        with failing_uploads("transfer"):
            manager.save(2, state(2), force=True)
            with pytest.raises(StorageError, match="the store is broken"):
                manager.wait()
    session_of().engine.shared.last_commit = None


def test_the_next_job_continues_the_upload(places: Places) -> None:
    leave_an_upload(places)
    with bcp.CheckpointManager(
        bcp.Location(places.store, tier=bcp.Tier(places.tier)), keep=1, save=bcp.SaveOptions(base="auto")
    ) as manager:
        resumed = {"model": {"base": torch.zeros(SIZE), "adapter": torch.zeros(5000)}, "extra_state": {"step": -1}}
        assert manager.resume(resumed) is not None
        assert resumed["extra_state"]["step"] == 2
        manager.save(3, state(3), force=True)
        manager.wait()
    check(places.path(3), 3)
    assert {path.name for path in places.store.iterdir()} - {"lease.msgpack"} == {"objects", "step-3"}


def test_a_checkpoint_whose_upload_has_just_begun_is_the_newest(places: Places) -> None:
    """A folder shows a file from its creation on, when nothing of it is written yet."""
    leave_an_upload(places)
    staged = places.staged_objects(2)
    places.objects(2).mkdir()
    for file in staged.iterdir():
        (places.objects(2) / file.name).touch()
    newest = bcp.latest(bcp.Location(places.store, tier=bcp.Tier(places.tier)))
    assert newest is not None
    assert newest.step == 2
    check(places.location(2), 2)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_another_job_cleans_up_before_the_upload_is_continued(
    places: Places, monkeypatch: pytest.MonkeyPatch, is_removed: bool, is_late: bool
) -> None:
    """It is on another machine, where no upload is recorded. It keeps what is uploaded of it for a day."""
    leave_an_upload(places)
    if is_late:
        later = time.time() + 25 * 3600
        monkeypatch.setattr(attempts, "time", SimpleNamespace(**{**vars(time), "time": lambda: later}))
    with bcp.CheckpointManager(places.store, keep=1 if is_removed else None) as manager:
        manager.save(3, {"other": torch.ones(5)}, force=True)
    assert (places.path(1) / "manifest.msgpack").exists() != is_removed
    report = finish_upload(*unfinished_uploads(str(places.tier)))
    assert (report is None) == (is_removed and is_late)
    if report is None:
        assert not (places.path(2) / "manifest.msgpack").exists()
    else:
        check(places.path(2), 2)


@pytest.mark.s3
def test_on_s3(tmp_path: Path, bucket: str, s3: dict[str, Any]) -> None:
    runs = f"s3://{bucket}/runs"
    root = bcp.Location(runs, tier=bcp.Tier(tmp_path), storage_options=s3)
    with bcp.CheckpointManager(root, keep=2, save=bcp.SaveOptions(base="auto")) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), force=True)
            manager.wait()
    stored = {stat.key: stat.size for stat in open_backend(runs, **s3).list()}
    assert sum(stored.values()) < 1.1 * 4 * SIZE
    assert "step-1/manifest.msgpack" not in stored
    for step in (2, 3):
        check(bcp.Location(f"{runs}/step-{step}", storage_options=s3), step)
        check(root.join(f"step-{step}"), step)
