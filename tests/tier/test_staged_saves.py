"""Saves to a tier, from which the checkpoint is uploaded; and loads of the nearest copy."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting_backend import CountingBackend
from sorted_arguments import loading, saving
from tier_faults import failing_uploads, opens_silent_store

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import attempts
from bytecheckpoint.checkpoint.attempts import remove_attempt
from bytecheckpoint.checkpoint.nearest import JOURNAL_PREFIX, open_nearest, open_tier
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.convert.copy import finish_upload, remove, unfinished_uploads
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    RootInUseError,
    SavePendingError,
    StorageError,
    UploadSkippedError,
    UsageError,
)
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, decode, encode
from bytecheckpoint.manager import tier
from bytecheckpoint.manager.tier import TierFolder
from bytecheckpoint.storage_backends import base, open_backend
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.local.page_cache import PageCache
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.transfer import staged
from bytecheckpoint.transfer.journal import Journal, JournalHead, find_journals

WAIT_S = time_limit(60)
SIZE = 1_500_000  # several chunks, and several reads


def state(value: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(int(value))
    model = {"weight": torch.randn(SIZE, generator=generator), "bias": torch.full((5,), value)}
    return {"model": model, "extra_state": {"value": value}}


def empty() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(SIZE), "bias": torch.zeros(5)}, "extra_state": {"value": -1.0}}


def check(loaded: dict[str, Any], value: float) -> None:
    expected = state(value)
    assert loaded["extra_state"]["value"] == value
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name


class Places:
    """A store and a tier, both local, and the checkpoint's folder in each."""

    def __init__(self, tmp_path: Path) -> None:
        self.store, self.tier = tmp_path / "store", tmp_path / "tier"

    @property
    def root(self) -> bcp.Location:
        return bcp.Location(self.store, tier=bcp.Tier(self.tier))

    def path(self, name: str = "step-1") -> Path:
        return self.store / name

    def staged(self, name: str = "step-1") -> Path:
        return self.tier / "file" / str(self.store).lstrip("/") / name

    def save(self, value: float, name: str = "step-1", **options: Any) -> bcp.SaveHandle:
        return bcp.save(self.root.join(name), state(value), **saving(**options))

    def load(self, name: str = "step-1", **options: Any) -> tuple[dict[str, Any], bcp.LoadReport]:
        loaded = empty()
        return loaded, bcp.load(self.root.join(name), loaded, **loading(**options))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    backend = open_backend(folder)
    return {stat.key: backend.get(stat.key) for stat in backend.list()}


@contextmanager
def held_uploads() -> Iterator[None]:
    """Keep uploads from beginning until the block ends."""
    go_on = threading.Event()

    def observe(name: str, event: str) -> None:
        if (name, event) == ("upload.transfer", "enter"):
            assert go_on.wait(WAIT_S)

    stop = telemetry.observe(observe)
    try:
        yield
    finally:
        go_on.set()
        stop()


def fail_upload(places: Places, value: float, at: str = "transfer") -> str:
    """Save, and let the upload fail in this step; return the attempt."""
    with failing_uploads(at):
        handle = places.save(value)
        with pytest.raises(StorageError, match="the store is broken"):
            handle.uploaded(WAIT_S)
    return handle.result().attempt


def test_a_listing_during_which_an_upload_ends(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes back must see every checkpoint, or it would not abandon one that is uploaded this moment."""
    with failing_uploads():
        handle = bcp.save(places.root.join("step-1"), state(1.0), step=1)
        with pytest.raises(StorageError, match="the store is broken"):
            handle.uploaded(WAIT_S)
    session_of().engine.uploads.submit(int).result()  # it has closed its journal
    nearest = open_nearest(places.root)
    store = nearest._far  # type: ignore[attr-defined]
    children = store.list_children

    def list_and_upload(prefix: str = "") -> Any:
        found = children(prefix)
        for one in unfinished_uploads(places.tier):
            finish_upload(one)
        return found

    monkeypatch.setattr(store, "list_children", list_and_upload)
    assert "step-1/" in nearest.list_children("")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_is_in_both_places(places: Places, is_async: bool) -> None:
    with held_uploads():
        handle = places.save(1.0, async_save=is_async)
        handle.result(WAIT_S)
        assert not handle.is_uploaded()
        assert not (places.path() / "manifest.msgpack").exists()
        check(places.load()[0], 1.0)
        with pytest.raises(CheckpointNotFoundError):
            bcp.open(places.path())
    assert handle.uploaded(WAIT_S) == handle.result()
    assert handle.result().url == handle.url == str(places.path())
    assert contents(places.path()) == contents(places.staged())
    assert bcp.open(places.path()).verify().ok
    assert list(find_journals(str(places.tier))) == []


def test_the_result_is_that_of_the_first_commit(places: Places) -> None:
    with held_uploads():
        handle = places.save(1.0, async_save=True)
        result = handle.result(WAIT_S)
        assert handle.done()
        assert handle.exception() is None
        assert handle.staged()
        with pytest.raises(SavePendingError):
            handle.uploaded(0.0)
        assert not (places.path() / "manifest.msgpack").exists()
    assert handle.uploaded(WAIT_S) == result
    assert bcp.open(places.path()).verify().ok


def test_a_manager_warns_when_uploads_are_slower_than_saves(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    with bcp.CheckpointManager(places.root, preemption=None) as manager, held_uploads():
        counts = []
        for step in range(1, 9):
            manager.save(step, state(1.0), force=True)
            counts.append(sum("wait for their upload" in record.message for record in caplog.records))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("keep", "uploaded"),
    [(None, [1, 6, 5, 4, 3, 2]), (2, [1, 6, 5]), (bcp.Retention(last=1, every_steps=4), [1, 6, 4])],
)
def test_the_newest_checkpoint_is_uploaded_first(places: Places, keep: Any, uploaded: list[int]) -> None:
    """What retention would remove at once is not uploaded. A regression: every checkpoint was, in order."""
    order: list[int] = []
    callbacks = bcp.Callbacks(on_uploaded=lambda result: order.append(result.step or 0))
    with bcp.CheckpointManager(places.root, preemption=None, keep=keep, callbacks=callbacks) as manager:
        with held_uploads():
            handles = [manager.save(step, state(1.0), force=True) for step in range(1, 7)]
            assert [one.result(WAIT_S).step for one in handles if one is not None] == [1, 2, 3, 4, 5, 6]
            assert handles[0] is not None
            assert handles[0].uploads_waiting() == 5
        manager.wait()
        assert handles[0].uploads_waiting() == 0
    assert order == uploaded
    for step, handle in enumerate(handles, 1):
        assert handle is not None
        with nullcontext() if step in uploaded else pytest.raises(UploadSkippedError, match="was not uploaded"):
            handle.uploaded(WAIT_S)
    kept = {None: [1, 2, 3, 4, 5, 6], 2: [5, 6]}.get(keep, [4, 6])
    assert sorted(path.name for path in places.store.iterdir()) == [f"step-{step}" for step in kept]
    assert list(find_journals(str(places.tier))) == []


@pytest.mark.parametrize("saves", [False, True])
def test_the_backlog_of_an_ended_job_holds_up_no_save(
    places: Places, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """Its newest checkpoint goes first, and what retention would remove is discarded, also because of a later save."""
    with failing_uploads():
        manager = bcp.CheckpointManager(places.root, preemption=None, keep=3)
        for step in range(1, 7):
            manager.save(step, state(1.0), force=True)
        with pytest.raises(StorageError, match="is broken"):
            manager.close()
    order: list[int] = []
    may_begin = threading.Event()

    def record(folder: LocalBackend, *arguments: Any, **options: Any) -> Any:
        assert may_begin.wait(WAIT_S)
        report = staged.continue_upload(folder, *arguments, **options)
        order.append(int(folder.url.rpartition("-")[2]) * (1 if report is not None else -1))
        return report

    def observe(name: str, event: str) -> None:
        if (name, event) == ("upload.commit", "exit"):
            order.append(7)

    monkeypatch.setattr(tier, "continue_upload", record)
    stop = telemetry.observe(observe)
    with bcp.CheckpointManager(places.root, preemption=None, keep=3) as manager:
        manager.resume(loaded := empty())
        check(loaded, 1.0)
        if saves:
            manager.save(7, state(2.0), force=True)
        may_begin.set()
    stop()
    assert order == ([6, 7, 5, -4, -3, -2, -1] if saves else [6, 5, 4, -3, -2, -1])
    assert sorted(path.name for path in places.store.iterdir()) == [f"step-{step}" for step in (4, 5, 6)[saves:]] + (
        ["step-7"] if saves else []
    )
    assert list(find_journals(str(places.tier))) == []


def test_failed_uploads_are_continued_only_if_they_are_kept(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was down for a while. A regression: all that was saved meanwhile was sent, and removed at once."""
    sent: list[str] = []

    def record(folder: LocalBackend, *arguments: Any, **options: Any) -> Any:
        report = staged.continue_upload(folder, *arguments, **options)
        if report is not None:
            sent.append(os.path.basename(folder.url))
        return report

    monkeypatch.setattr(tier, "continue_upload", record)
    with bcp.CheckpointManager(places.root, preemption=None, keep=2) as manager:
        with failing_uploads():
            for step in range(1, 9):
                handle = manager.save(step, state(1.0), force=True)
                assert handle is not None
                with pytest.raises(StorageError, match="is broken"):
                    handle.uploaded(WAIT_S)
        manager.save(9, state(1.0), force=True)
    assert sent == ["step-8"]
    assert sorted(path.name for path in places.store.iterdir()) == ["step-8", "step-9"]
    assert list(find_journals(str(places.tier))) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_manager_does_not_wait_for_the_path(places: Places, is_async: bool) -> None:
    """Only the handles do."""
    with failing_uploads(), bcp.CheckpointManager(places.root, preemption=None, async_save=is_async) as manager:
        handle = manager.save(1, state(1.0), force=True)
        assert handle is not None
        handle.result(WAIT_S)
        with pytest.raises(StorageError, match="the store is broken"):
            handle.uploaded(WAIT_S)
        manager.save(2, state(2.0), force=True)
        with pytest.raises(StorageError, match="the store is broken"):
            manager.wait()


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_manager_reports_an_upload_that_failed_before_others_succeeded(
    places: Places, monkeypatch: pytest.MonkeyPatch, is_continued: bool
) -> None:
    """Unless it was continued since, and succeeded."""
    if not is_continued:
        monkeypatch.setattr(TierFolder, "_continue", lambda *arguments, **options: None)
    with bcp.CheckpointManager(places.root, preemption=None) as manager:
        with failing_uploads():
            failed = manager.save(1, state(1.0), force=True)
            assert failed is not None
            with pytest.raises(StorageError, match="the store is broken"):
                failed.uploaded(WAIT_S)
        for step in (2, 3):
            done = manager.save(step, state(2.0), force=True)
            assert done is not None
            done.uploaded(WAIT_S)
        with nullcontext() if is_continued else pytest.raises(StorageError, match="the store is broken"):
            manager.wait()
        assert (places.path() / MANIFEST_KEY).exists() == is_continued
        manager.wait()


def test_without_a_tier_a_save_is_uploaded_when_it_is_committed(tmp_path: Path) -> None:
    called = []
    handle = bcp.save(tmp_path / "step-1", state(1.0))
    handle.add_uploaded_callback(called.append)
    assert handle.is_uploaded()
    assert handle.uploaded() == handle.result()
    assert called == [handle]


@pytest.mark.parametrize("options", [{}, {"codec": "zstd"}, {"layout": "whole"}], ids=str)
def test_a_load_reads_what_is_near(places: Places, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    places.save(1.0, **options).uploaded(WAIT_S)
    opened: list[str] = []
    original = LocalBackend.open_object

    def open_object(self: LocalBackend, key: str) -> Any:
        opened.append(self.url)
        return original(self, key)

    monkeypatch.setattr(LocalBackend, "open_object", open_object)
    loaded, report = places.load()
    check(loaded, 1.0)
    assert set(opened) == {str(places.staged())}
    assert report.notes == []
    assert "read" not in report.timings.work
    assert report.timings.work["read tier"].nbytes >= loaded["model"]["weight"].nbytes


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_not_near_is_read_from_the_store(places: Places, verify: bool) -> None:
    places.save(1.0).uploaded(WAIT_S)
    for path in places.staged().rglob("model-*"):
        path.unlink()
    loaded, report = places.load(options=bcp.LoadOptions(verify=verify))
    check(loaded, 1.0)
    assert [note for note in report.notes if "were read from the store" in note]
    assert "read tier" not in report.timings.work
    assert report.timings.work["read"].nbytes >= loaded["model"]["weight"].nbytes


def test_unchanged_bytes_that_are_not_near_count_as_those_of_the_store(places: Places) -> None:
    """An incremental checkpoint has files near, which refer to files of an older one that are not."""
    incremental = bcp.SaveOptions(base="auto")
    bcp.save(places.path(), state(1.0), options=incremental)
    changed = state(1.0)
    changed["model"]["bias"][0] = 7
    bcp.save(places.root.join("step-2"), changed, options=incremental).uploaded(WAIT_S)
    _, report = places.load("step-2")
    assert report.timings.work["read"].nbytes >= changed["model"]["weight"].nbytes


@pytest.mark.parametrize("options", [{}, {"codec": "zstd"}], ids=str)
@pytest.mark.parametrize("damage", ["head", "middle", "short", "values"])
def test_damaged_ranges_are_read_from_the_store(
    places: Places, damage: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    places.save(1.0, **options).uploaded(WAIT_S)
    pattern = "extra_state-*.msgpack" if damage == "values" else "model-*"
    path = next(path for path in places.staged().rglob(pattern) if damage == "values" or path.stat().st_size > 1e6)
    data = bytearray(path.read_bytes())
    data[{"head": 9, "middle": len(data) // 2, "short": 0, "values": 40}[damage]] ^= 0 if damage == "short" else 1
    path.write_bytes(data[: len(data) // 2] if damage == "short" else data)
    with caplog.at_level(logging.WARNING):
        loaded, report = places.load()
    check(loaded, 1.0)
    assert "cannot be used" in caplog.text
    assert [note for note in report.notes if "damaged" in note]
    if damage == "middle":  # the other ranges are read near
        assert report.bytes_read < 1.5 * report.bytes_requested
    assert bcp.open(places.root.join("step-1")).verify().problems == ()
    # The same bytes, damaged in both places, are an error.
    there = places.path() / path.relative_to(places.staged())
    there.write_bytes(path.read_bytes())
    with pytest.raises((bcp.errors.CorruptionError, bcp.errors.StorageError)):
        places.load()
    assert len(bcp.open(places.root.join("step-1")).verify().problems) == 1


@pytest.mark.parametrize("damage", ["head", "middle", "values"])
def test_damage_in_the_store_is_not_blamed_on_the_copy(
    places: Places, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    places.save(1.0).uploaded(WAIT_S)
    pattern = "extra_state-*.msgpack" if damage == "values" else "model-*"
    path = next(path for path in places.path().rglob(pattern) if damage == "values" or path.stat().st_size > 1e6)
    data = bytearray(path.read_bytes())
    data[{"head": 9, "middle": len(data) // 2, "values": 40}[damage]] ^= 1
    path.write_bytes(data)
    (places.staged() / path.relative_to(places.path())).unlink()
    with pytest.raises(bcp.errors.CorruptionError, match=str(path)):
        places.load()
    assert "cannot be used" not in caplog.text


def rename_files(folder: Path, names: dict[str, str]) -> None:
    """Let data files of a checkpoint have other names. A save does not make such names."""
    manifest = decode((folder / MANIFEST_KEY).read_bytes())
    files = manifest.files
    for row, key in enumerate(files.name):
        attempt, name = key.split("/", 1)
        files.name[row] = f"{attempt}/{names.get(name, name)}"
        (folder / key).rename(folder / files.name[row])
    (folder / MANIFEST_KEY).write_bytes(encode(manifest))


@pytest.mark.parametrize("damage", ["bytes", "head", "short"])
def test_damage_to_a_copy_whose_key_contains_that_of_a_file_that_is_not_near(places: Places, damage: str) -> None:
    places.save(1.0).uploaded(WAIT_S)
    for folder in (places.path(), places.staged()):
        rename_files(folder, {"extra_state-00000.msgpack": "file", "model-00000.safetensors": "file-2"})
    next(places.staged().glob("*/file")).unlink()
    path = next(places.staged().glob("*/file-2"))
    data = bytearray(path.read_bytes())
    data[9 if damage == "head" else len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage == "short" else data)
    loaded, report = places.load()
    check(loaded, 1.0)
    assert ["1 file(s) are not" in note or "damaged" in note for note in report.notes] == [True, True]


def test_a_disk_that_cannot_read_the_copy(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.save(1.0).uploaded(WAIT_S)

    def fail(self: PageCache, *_: int) -> bool:
        if os.readlink(f"/proc/self/fd/{self._fd}").startswith(str(places.tier)):
            raise OSError(errno.EIO, "the disk is broken")
        return True

    monkeypatch.setattr(PageCache, "has", fail)
    loaded, report = places.load()
    check(loaded, 1.0)
    assert [note for note in report.notes if "damaged" in note]


@pytest.mark.parametrize("damage", ["bytes", "missing"])
def test_damage_to_an_older_checkpoint_is_not_blamed_on_the_copy(
    places: Places, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bcp.save(places.path(), state(1.0), options=bcp.SaveOptions(base="auto"))
    changed = state(1.0)
    changed["model"]["bias"][0] = 7
    bcp.save(places.path("step-2"), changed, options=bcp.SaveOptions(base="auto"))
    assert bcp.open(places.path("step-2")).manifest.references.name
    path = max((places.path().parent / "objects").rglob("model-*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage == "bytes":
        path.write_bytes(data)
    with pytest.raises(bcp.errors.CorruptionError, match=str(path)):
        places.load("step-2")
    assert "cannot be used" not in caplog.text


def test_a_failed_upload_is_continued(places: Places) -> None:
    fail_upload(places, 1.0)
    check(places.load()[0], 1.0)
    [upload] = unfinished_uploads(str(places.tier))
    assert (upload.path, upload.url, upload.head.rank) == (str(places.staged()), str(places.path()), 0)
    report = finish_upload(upload)
    assert report.sent == report.size == upload.size
    assert contents(places.path()) == contents(places.staged())
    assert unfinished_uploads(str(places.tier)) == []


@pytest.mark.parametrize("damage", ["emptied", "flipped"])
@pytest.mark.parametrize("way", ["manager", "destination", "root as destination"])
def test_a_damaged_journal_is_reported_and_begun_again(places: Places, damage: str, way: str) -> None:
    """A regression: it was no journal at all, so the checkpoint counted as uploaded."""
    fail_upload(places, 1.0)
    [(path, _)] = find_journals(str(places.tier))
    Path(path).write_bytes(b"" if damage == "emptied" else b"\xff" + Path(path).read_bytes()[1:])
    newest = bcp.latest(places.root)
    assert newest is not None
    [upload] = unfinished_uploads(str(places.tier))
    with pytest.raises(UsageError, match="is damaged: the checkpoint at its side may not be uploaded"):
        finish_upload(upload)
    if way == "manager":
        with bcp.CheckpointManager(places.root, preemption=None) as manager:
            manager.resume(loaded := empty())
        check(loaded, 1.0)
    else:
        destination = places.path() if way == "destination" else places.store
        report = finish_upload(*unfinished_uploads(places.tier, destination))
        assert report is not None
    assert contents(places.path()) == contents(places.staged())
    assert unfinished_uploads(str(places.tier)) == []


def test_a_damaged_journal_of_nothing_is_left(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    places.save(1.0).uploaded(WAIT_S)
    path = places.staged() / (JOURNAL_PREFIX + "to-0123456789abcdef")
    path.touch()
    with bcp.CheckpointManager(places.root, preemption=None) as manager:
        manager.save(2, state(2.0), force=True)
    assert f"{path} is damaged, and not of the checkpoint at its side" in caplog.text
    assert [one.problem != "" for one in unfinished_uploads(str(places.tier))] == [True]


def test_a_full_disk_leaves_no_empty_journal(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.save(1.0).uploaded(WAIT_S)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="cannot write the journal"):
            Journal(str(places.staged()), JournalHead("to", str(places.path()), "attempt-x", 0))
    remove(places.path())
    assert bcp.latest(places.root) is None


def test_a_failed_commit_is_continued_without_sending_anything_again(places: Places) -> None:
    fail_upload(places, 1.0, at="commit")
    assert not (places.path() / "manifest.msgpack").exists()
    report = finish_upload(*unfinished_uploads(str(places.tier)))
    assert report.sent == 0
    check(places.load()[0], 1.0)


def test_a_job_begins_while_an_upload_of_an_ended_job_is_continued(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def observe(name: str, event: str) -> None:
        if (name, event) == ("upload.commit", "enter"):
            raise StorageError("the store is broken")

    stop = telemetry.observe(observe)
    try:
        with (
            pytest.raises(StorageError, match="the store is broken"),
            bcp.CheckpointManager(places.root, preemption=None) as manager,
        ):
            manager.save(1, state(1.0), force=True)
    finally:
        stop()
    original = staged.commit

    def commit_late(*arguments: Any, **options: Any) -> Any:
        with bcp.CheckpointManager(places.store, preemption=None) as manager:
            manager.save(2, {"extra": {"x": 2}}, force=True)
        return original(*arguments, **options)

    monkeypatch.setattr(staged, "commit", commit_late)
    assert finish_upload(*unfinished_uploads(str(places.tier))).sent == 0
    assert "sending them again" not in caplog.text
    assert bcp.open(places.path()).verify().ok
    assert contents(places.path()) == contents(places.staged())


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_upload_takes_more_than_a_day(places: Places, monkeypatch: pytest.MonkeyPatch, is_removed: bool) -> None:
    """Then nothing protects its files from other jobs any more, until its end."""

    def observe(name: str, event: str) -> None:
        if (name, event) == ("upload.transfer", "exit"):
            later = time.time() + 25 * 3600
            monkeypatch.setattr(attempts, "time", SimpleNamespace(**{**vars(time), "time": lambda: later}))
            if is_removed:
                remove_attempt(open_backend(places.path()), bcp.open(places.staged()).manifest.attempt)

    stop = telemetry.observe(observe)
    try:
        handle = places.save(1.0)
        if is_removed:
            with pytest.raises(StorageError, match="another program removed them"):
                handle.uploaded(WAIT_S)
            assert not (places.path() / MANIFEST_KEY).exists()
            finish_upload(*unfinished_uploads(str(places.tier)))
        else:
            handle.uploaded(WAIT_S)
    finally:
        stop()
    assert bcp.open(places.path()).verify().ok
    assert contents(places.path()) == contents(places.staged())


def test_files_that_vanish_at_the_commit_are_sent_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_upload(places, 1.0, at="commit")
    original = staged.commit

    def commit_and_remove(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        open_backend(places.path()).delete([key for key in contents(places.path()) if key.startswith("attempt-")])
        return result

    monkeypatch.setattr(staged, "commit", commit_and_remove)
    finish_upload(*unfinished_uploads(str(places.tier)))
    assert contents(places.path()) == contents(places.staged())


def test_a_failed_save_leaves_nothing_to_upload(places: Places) -> None:
    def observe(name: str, event: str) -> None:
        if name == "save.commit.before":
            raise StorageError("the disk is broken")

    stop = telemetry.observe(observe)
    try:
        handle = places.save(1.0, async_save=True)
        with pytest.raises(StorageError, match="the disk is broken"):
            handle.uploaded(WAIT_S)
        assert handle.is_uploaded()
    finally:
        stop()
    assert unfinished_uploads(str(places.tier)) == []
    assert not places.staged().exists() or contents(places.staged()) == {}


def test_overwritten_while_it_is_uploaded(places: Places) -> None:
    """The store ends with the last save, and neither place keeps files of the first one."""
    with held_uploads():
        first = places.save(1.0)
        second = places.save(2.0)
        assert len(list(find_journals(str(places.tier)))) == 2
        check(places.load()[0], 2.0)
    first.uploaded(WAIT_S)
    second.uploaded(WAIT_S)
    check(places.load()[0], 2.0)
    assert contents(places.path()) == contents(places.staged())
    assert {key.partition("/")[0] for key in contents(places.path())} == {"manifest.msgpack", second.result().attempt}


def test_an_upload_of_an_overwritten_checkpoint_is_discarded(places: Places) -> None:
    fail_upload(places, 1.0, at="commit")
    attempt = fail_upload(places, 2.0)
    by_attempt = {one.head.attempt: one for one in unfinished_uploads(str(places.tier))}
    last = by_attempt.pop(attempt)
    assert finish_upload(*by_attempt.values()) is None
    assert contents(places.path()) == {}
    finish_upload(last)
    assert contents(places.path()) == contents(places.staged())
    check(places.load()[0], 2.0)


def test_the_journal_of_a_committed_upload_is_left(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies between the commit in the store and the removal of its journal; the path is saved to again."""
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: None)
        first = places.save(1.0)
        first.uploaded(WAIT_S)
    before = contents(places.path())
    attempt = fail_upload(places, 2.0)
    by_attempt = {one.head.attempt: one for one in unfinished_uploads(str(places.tier))}
    finish_upload(by_attempt.pop(first.result().attempt))
    assert contents(places.path()) == before
    assert bcp.open(places.path()).verify().ok
    assert [one.head.attempt for one in unfinished_uploads(str(places.tier))] == [attempt]
    finish_upload(*by_attempt.values())
    assert contents(places.path()) == contents(places.staged())


def test_a_later_checkpoint_in_the_store_is_not_replaced(places: Places, tmp_path: Path) -> None:
    fail_upload(places, 1.0, at="commit")
    bcp.save(places.path(), state(3.0))
    check(places.load()[0], 3.0)
    assert finish_upload(*unfinished_uploads(str(places.tier))) is None
    check(places.load()[0], 3.0)
    assert {key.partition("/")[0] for key in contents(places.path())} == {
        "manifest.msgpack",
        bcp.open(places.path()).manifest.attempt,
    }


def test_a_checkpoint_that_was_removed_in_the_store_is_not_loaded(places: Places) -> None:
    places.save(1.0).uploaded(WAIT_S)
    places.save(2.0, "step-2").uploaded(WAIT_S)
    remove(str(places.path("step-2")))
    newest = bcp.latest(places.root)
    assert newest is not None
    assert newest.url == str(places.path("step-1"))
    with pytest.raises(CheckpointNotFoundError):
        places.load("step-2")


def test_latest_finds_what_is_not_uploaded(places: Places) -> None:
    places.save(1.0).uploaded(WAIT_S)
    with held_uploads():
        last = places.save(2.0, "step-2")
        newest = bcp.latest(places.root)
        assert newest is not None
        assert newest.url == str(places.path("step-2"))
        assert torch.equal(newest["model.weight"].load(), state(2.0)["model"]["weight"])
        only_store = bcp.latest(places.store)
        assert only_store is not None
        assert only_store.url == str(places.path())
    last.uploaded(WAIT_S)


def test_a_store_that_cannot_be_read(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.save(1.0).uploaded(WAIT_S)
    url = str(places.path())

    class Broken(CountingBackend):
        def get(self, key: str, *, max_size: int | None = None) -> bytes:
            raise StorageError("no connection")

    monkeypatch.setattr(
        "bytecheckpoint.checkpoint.location.open_backend",
        lambda path, **options: Broken(open_backend(path)) if os.fspath(path) == url else open_backend(path),
    )
    check(places.load()[0], 1.0)


@pytest.mark.parametrize("what", ["latest", "resume", "best"])
def test_a_store_that_does_not_answer_is_waited_for_once(
    places: Places, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with bcp.CheckpointManager(places.root, cadence=1, preemption=None) as manager:
        manager.save(1, state(1.0), metrics={"loss": 1.0})
    limits: list[float] = []
    with bcp.CheckpointManager(places.root, preemption=None, job=bcp.JobOptions(deadline_s=600)) as manager:
        monkeypatch.setattr(bcp.checkpoint.location, "open_backend", opens_silent_store(str(places.store), limits))
        if what == "resume":
            loaded = empty()
            manager.resume(loaded)
            check(loaded, 1.0)
        else:
            newest = bcp.latest(places.root, deadline_s=600) if what == "latest" else manager.best("loss", "min")
            assert newest is not None
            assert newest.url == str(places.path())
    first, *others = limits
    assert first == 600
    assert others
    assert max(others) < 1


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_job_begins_while_the_store_is_down(places: Places, monkeypatch: pytest.MonkeyPatch, is_in_use: bool) -> None:
    """It resumes from the tier and saves there. A regression: it could not begin."""
    fail_upload(places, 1.0)
    is_down = threading.Event()

    class Unreliable(LocalBackend):
        def _resolve(self, key: str, action: str) -> str:
            return self._locate(key, action)

        def _locate(self, key: str, action: str) -> str:
            if is_down.is_set():
                raise StorageError("the store is down")
            return super()._locate(key, action)

        def list_children(self, prefix: str = "") -> Any:
            if is_down.is_set():
                raise StorageError("the store is down")
            return super().list_children(prefix)

    def open_unreliable(path: Any, **options: Any) -> LocalBackend:
        return (Unreliable if os.fspath(path).startswith(str(places.store)) else LocalBackend)(path)

    monkeypatch.setattr(bcp.checkpoint.location, "open_backend", open_unreliable)
    job = bcp.JobOptions(lease_s=0.3)
    other = bcp.CheckpointManager(str(places.store), preemption=None, job=job)
    if is_in_use:
        other.save(5, {"extra": {"x": 5}}, force=True)
        other.wait()
    is_down.set()
    manager = bcp.CheckpointManager(places.root, preemption=None, keep=1, job=job)
    manager.resume(loaded := empty())
    check(loaded, 1.0)
    handle = manager.save(2, state(2.0), force=True)
    assert handle is not None
    handle.result(WAIT_S)
    with pytest.raises(StorageError, match="the store is down"):
        handle.uploaded(WAIT_S)
    is_down.clear()
    if is_in_use:
        with pytest.raises(RootInUseError, match=r"is in use by|already has a CheckpointManager"):
            manager.save(3, state(3.0), force=True).uploaded(WAIT_S)  # already the save, if the manager has found it
        with pytest.raises(RootInUseError, match=r"is in use by|already has a CheckpointManager"):
            manager.save(4, state(4.0), force=True)
    else:
        last = manager.save(3, state(3.0), force=True)
        assert last is not None
        assert last.uploaded(WAIT_S).step == 3
    with suppress(RootInUseError, StorageError):
        manager.close()
    other.close()
    committed = [path.parent.name for path in places.store.glob(f"*/{MANIFEST_KEY}")]
    assert committed == ["step-5" if is_in_use else "step-3"]


def test_who_waits_for_the_upload_asks_for_the_outcome_of_the_save(places: Places) -> None:
    """``close`` does not raise it again."""

    def fail(name: str, event: str) -> None:
        if (name, event) == ("save.write", "enter"):
            raise StorageError("a broken disk")

    stop = telemetry.observe(fail)
    try:
        with bcp.Checkpointer() as saver:
            handle = saver.save(places.root.join("step-1"), state(1.0), async_save=True)
            with pytest.raises(StorageError, match="a broken disk"):
                handle.uploaded(WAIT_S)
            assert handle.is_asked
    finally:
        stop()


def test_the_rate_is_limited(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six parts, of which the first is sent at once."""
    monkeypatch.setattr(base._PiecewiseWriter, "part_bytes", 1 << 20)
    begun = time.monotonic()
    location = bcp.Location(places.path(), tier=bcp.Tier(places.tier, upload_rate=10 << 20))
    bcp.save(location, state(1.0)).uploaded(WAIT_S)
    assert time.monotonic() - begun > 0.5


@pytest.mark.parametrize("how", ["signal", "exception"])
def test_uploads_do_not_outlast_the_grace_period(places: Places, how: str) -> None:
    """An upload that would take weeks. The next job makes it."""
    preemption = bcp.Preemption(grace_s=time_limit(2.0))  # half of it for the last save
    handles = []

    def train() -> None:
        root = bcp.Location(places.store, tier=bcp.Tier(places.tier, upload_rate=1.0))
        with bcp.CheckpointManager(root, preemption=preemption) as manager:
            handles.append(manager.save(1, state(1.0), force=True))
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                manager.save(2, state(2.0))
            raise ZeroDivisionError

    with pytest.raises(SystemExit if how == "signal" else ZeroDivisionError):
        train()
    assert handles[0].is_uploaded()
    assert not (places.path() / "manifest.msgpack").exists()
    check(places.load()[0], 1.0)
    with bcp.CheckpointManager(places.root, preemption=preemption) as manager:
        manager.resume(loaded := empty())
    check(loaded, 2.0 if how == "signal" else 1.0)
    assert bcp.open(places.path()).verify().ok
    assert list(find_journals(str(places.tier))) == []


def test_invalid_arguments(places: Places) -> None:
    with pytest.raises(UsageError, match=r"Tier.upload_rate must be a positive number"):
        bcp.Tier(places.tier, upload_rate=-1)
    with pytest.raises(UsageError, match=r"Tier.keep must be a whole number"):
        bcp.Tier(places.tier, keep=0)
    with pytest.raises(UsageError, match=r"Tier.path must be a path"):
        bcp.Tier(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Location.tier must be a bytecheckpoint.Tier"):
        bcp.Location(places.store, tier=str(places.tier))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tier must be a local folder"):
        bcp.save(bcp.Location(places.path(), tier=bcp.Tier("memory://x")), state(1.0))
    assert not places.store.exists()
    assert not places.tier.exists()


def test_a_user_and_a_password_are_no_folder(tmp_path: Path) -> None:
    folder = open_tier(tmp_path, MemoryBackend("user:secret@runs", "7b"))
    assert folder.url == str(tmp_path / "memory" / "runs" / "7b")


def test_endpoints_have_folders_of_their_own(tmp_path: Path) -> None:
    store = MemoryBackend("runs", "7b")
    store.options = {"endpoint_url": "http://user:secret@minio:9000/"}
    assert open_tier(tmp_path, store).url == str(tmp_path / "memory@minio-9000" / "runs" / "7b")
    store.options = {"client_kwargs": {"endpoint_url": "https://s3.example.org"}}
    assert open_tier(tmp_path, store).url == str(tmp_path / "memory@s3.example.org" / "runs" / "7b")
