"""Folders that somebody else has packed may have links in them: no removal and no overwrite follows one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.sweep import remove_uncommitted
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends import open_backend

OLD_ATTEMPT = "attempt-20200101T000000Z-0123456789abcdef"


def _state(step: int = 0) -> dict[str, object]:
    return {"model": {"w": torch.full((4,), float(step))}}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=["a sibling of the checkpoint", "outside of the root"])
def documents(request: pytest.FixtureRequest, root: Path) -> Path:
    """A folder with a file of the name that the checkpoint's own file has, and others."""
    folder = (root if request.param.startswith("a sibling") else root.parent) / "documents"
    (folder / "taxes").mkdir(parents=True)
    for name in ("model-00000.safetensors", "taxes/a.txt"):
        (folder / name).write_bytes(b"dear")
    return folder


@pytest.fixture
def hostile(root: Path, documents: Path) -> Path:
    """A checkpoint whose folder of files is a link to the documents."""
    path = root / "step-1"
    bcp.save(path, _state(), step=1)
    attempt = path / bcp.open(path).manifest.attempt
    for file in attempt.iterdir():
        file.unlink()
    attempt.rmdir()
    attempt.symlink_to(documents)
    return path


def _remove(path: Path) -> None:
    with pytest.raises(StorageError, match="symbolic link"):
        remove(str(path))


def _overwrite(path: Path) -> None:
    bcp.save(path, _state(2), step=2)
    assert bcp.open(path).step == 2


def _retain(path: Path) -> None:
    with bcp.CheckpointManager(path.parent, keep=1, cadence=1, async_save=False) as manager:
        manager.save(5, _state(5))
    assert not (path / "manifest.msgpack").exists()
    assert bcp.latest(path.parent).step == 5


@pytest.mark.parametrize("act", [_remove, _overwrite, _retain])
def test_files_behind_a_link_stay(
    hostile: Path, documents: Path, act: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = _contents(documents)
    caplog.set_level(logging.WARNING)
    act(hostile)
    assert _contents(documents) == before
    assert act is _remove or "symbolic link" in caplog.text


def _clean(root: Path) -> None:
    remove_uncommitted(open_backend(root / "step-1"), 0)
    remove_uncommitted(open_backend(root), 3600)
    with bcp.CheckpointManager(root, keep=1, cadence=1, async_save=False) as manager:
        manager.save(5, _state(5))


def test_attempts_that_are_links_stay(root: Path, documents: Path) -> None:
    """They look like what a failed save has left long ago, to a manager and to ``bcp clean``."""
    bcp.save(root / "step-1", _state(), step=1)
    (root / "step-1" / OLD_ATTEMPT).symlink_to(documents)
    before = _contents(documents)
    _clean(root)
    assert _contents(documents) == before


def test_attempts_in_a_folder_that_is_a_link_stay(root: Path, tmp_path: Path) -> None:
    bcp.save(root / "step-1", _state(), step=1)
    other = tmp_path / "other"
    (other / OLD_ATTEMPT).mkdir(parents=True)
    (other / OLD_ATTEMPT / "file").write_bytes(b"dear")
    (root / "step-2").symlink_to(other)
    before = _contents(other)
    _clean(root)
    assert _contents(other) == before


def test_retention_does_not_follow_the_link_of_a_checkpoint(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "step-9"
    bcp.save(other, _state(9), step=1)
    root.mkdir()
    (root / "step-1").symlink_to(other)
    before = _contents(other)
    with bcp.CheckpointManager(root, keep=1, cadence=1, async_save=False) as manager:
        for step in (5, 6):
            manager.save(step, _state(step))
    assert _contents(other) == before


def test_a_checkpoint_that_is_saved_through_a_link_is_overwritten(tmp_path: Path) -> None:
    """The user has named the link: what it leads to is the checkpoint."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for step in (1, 2):
        bcp.save(tmp_path / "link", _state(step), step=step)
    attempt = bcp.open(tmp_path / "link").manifest.attempt
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [attempt, "manifest.msgpack"]
    remove(str(tmp_path / "link"))
    assert not [*(tmp_path / "disk").iterdir()]
    assert (tmp_path / "link").is_symlink()
