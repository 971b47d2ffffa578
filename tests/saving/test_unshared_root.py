"""Two ranks whose path is not the same folder: each has its own file system there, as two hosts with local disks."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.saving import commit
from bytecheckpoint.testing.ranks import RankPool

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def _save_twice(rank: int, world_size: int, root: str, is_own: bool) -> tuple[str, list[str]]:
    """Return the last error, and the files that this rank sees afterwards."""
    commit._VISIBLE_S = 1.0
    libc = ctypes.CDLL(None)
    assert libc.unshare(_CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    if is_own and rank:
        assert libc.mount(b"none", root.encode(), b"tmpfs", 0, b"size=8m") == 0
    state = {"model": {"w": torch.ones(8)}, "extra_state": {"rank": rank}}
    error = ""
    for step in (1, 2):
        try:
            bcp.save(f"{root}/step-{step}", state)
        except StorageError as caught:
            error = str(caught)
    return error, sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


def _run(tmp_path: Path, *, is_own: bool) -> list[tuple[str, list[str]]]:
    root = tmp_path / "root"
    root.mkdir()
    with RankPool(2) as pool:  # the ranks keep their mounts
        return pool.run(_save_twice, str(root), is_own)


@pytest.fixture(autouse=True)
def may_unshare() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0 or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("needs the right to make mount namespaces")


def test_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    for error, files in _run(tmp_path, is_own=True):
        assert "is not the same folder on all hosts" in error
        assert "of rank 1" in error
        assert files == []


def test_a_shared_folder_is_accepted(tmp_path: Path) -> None:
    for error, files in _run(tmp_path, is_own=False):
        assert error == ""
        assert {file.partition("/")[0] for file in files} == {"step-1", "step-2"}
