"""Storage that takes nothing, or holds something else: a clear error, and what was there before is not lost."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from damage import MANIFEST, keys_of, with_version
from small_mounts import read_only, tiny_disk
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    AccessDeniedError,
    CheckpointError,
    CheckpointNotFoundError,
    NotACheckpointError,
    StorageError,
    StorageFullError,
    UnsupportedURLError,
    UnsupportedVersionError,
)
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit


def _tree(**entries: Any) -> dict[str, Any]:
    return {"extra_state": entries}


def _value(path: Path) -> int:
    """What is committed at ``path``."""
    return int(bcp.open(path).section_values("extra_state")[("value",)])


# -- storage -----------------------------------------------------------------------------------------------------------


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(StorageError, match=r"file") as caught:
        bcp.save(tmp_path / "file" / "checkpoint", _tree(value=1))
    assert str(tmp_path / "file" / "checkpoint") in str(caught.value)
    assert (tmp_path / "file").read_text() == "something"
    with pytest.raises((CheckpointNotFoundError, StorageError), match=re.escape(str(tmp_path / "file"))):
        bcp.load(tmp_path / "file" / "checkpoint", _tree(value=1))


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(StorageError, match="is a file, not a directory; pass another path"):
        bcp.save(tmp_path / "file", _tree(value=1))
    message = "file is not a checkpoint: it is no safetensors file, and torch.save did not write it"
    with pytest.raises(NotACheckpointError, match=message):
        bcp.load(tmp_path / "file", _tree(value=1))
    with pytest.raises(NotACheckpointError, match=message):
        bcp.open(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


def test_a_url_without_a_server() -> None:
    with pytest.raises(UnsupportedURLError, match=r"no storage backend serves nowhere://.*Known schemes: .*file"):
        bcp.save("nowhere://bucket/key", _tree(value=1))


def test_a_system_directory_that_takes_no_files() -> None:
    """Not even root makes files there."""
    with pytest.raises(StorageError, match=r"/proc/bytecheckpoint"):
        bcp.save("/proc/bytecheckpoint", _tree(value=1))


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(AccessDeniedError, match=r"check the owner, the mode"):
        bcp.save(tmp_path / "checkpoint", _tree(value=1))
    tmp_path.chmod(0o700)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "checkpoint"
        bcp.save(path, _tree(value=1))
        before = keys_of(path)
        with read_only(disk):
            for target in (path, disk / "another"):
                with pytest.raises(AccessDeniedError, match=r"read-only") as caught:
                    bcp.save(target, _tree(value=2))
                assert str(target) in str(caught.value)
                handle = bcp.save(target, _tree(value=2), async_save=True)
                assert isinstance(handle.exception(), AccessDeniedError)
            assert _value(path) == 1
            assert bcp.load(path, _tree(value=0)).loaded == ["extra_state.value"]
        assert keys_of(path) == before
        assert not (disk / "another").exists()


def test_a_full_disk(tmp_path: Path) -> None:
    """Found before or in the middle of the data: the old checkpoint stays, and the disk is not left fuller."""
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "checkpoint"
        bcp.save(path, _tree(value=1, weight=torch.ones(1000)))
        before = keys_of(path)
        free = LocalBackend(path).free_bytes()
        assert free is not None
        foreseen = rf"needs {1 << 24:,} bytes, but only {free:,} are free\. Nothing was written; free space"
        met = r"writing .attempt-\S+/extra_state-00000.safetensors.*needed: \d+ bytes, free on this file system: \d+ "
        # The tensors alone fit in the second case, and the file with all their names does not. One page too much is not
        # enough: of two threads that write at the same time, tmpfs lets both have the last one.
        names = {f"{number:0200}": torch.zeros(1) for number in range(200)}
        for elements, others, message in ((1 << 22, {}, foreseen), (free // 4 - len(names), names, met)):
            with pytest.raises(StorageFullError, match=message):
                bcp.save(path, _tree(value=2, weight=torch.zeros(elements), **others))
            assert keys_of(path) == before
            assert _value(path) == 1
            assert bcp.open(path)["extra_state.weight"].load().sum() == 1000
        bcp.save(path, _tree(value=3))
        assert _value(path) == 3


def test_a_codec_needs_only_the_space_of_its_frames(tmp_path: Path) -> None:
    """A disk has room for them, and not for the tensors. Without room for them, the old checkpoint stays."""
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "checkpoint"
        bcp.save(path, _tree(value=1, weight=torch.zeros(1 << 21)), options={"codec": "zstd"})
        assert bcp.open(path).verify().ok
        before = keys_of(path)
        with pytest.raises(StorageFullError, match="free on this file system"):
            bcp.save(path, _tree(value=2, weight=torch.randn(1 << 19)), options={"codec": "zstd"})
        with pytest.raises(StorageFullError, match="free on this file system"):
            bcp.save(disk / "new", _tree(value=2, weight=torch.randn(1 << 19)), options={"codec": "zstd"})
        assert not (disk / "new").exists()
        assert keys_of(path) == before
        assert _value(path) == 1


_LIMITED = """
import resource, signal, sys
import torch
import bytecheckpoint as bcp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[1]
bcp.save(path, {"extra_state": {"value": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    bcp.save(path, {"extra_state": {"value": 2, "weight": torch.zeros(100_000)}})
except bcp.errors.StorageFullError as error:
    print("full:", error)
print("value:", bcp.open(path).section_values("extra_state")[("value",)])
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    """What quotas look like where no file system can be mounted."""
    assert resource.RLIMIT_FSIZE is not None
    path = tmp_path / "checkpoint"
    done = warm_python().run(["-W", "ignore", "-c", _LIMITED, str(path)], timeout=time_limit(120), check=True)
    assert "full: writing 'attempt-" in done.stdout
    assert "ulimit -f" in done.stdout
    assert done.stdout.endswith("value: 1\n")
    assert len([key for key in keys_of(path) if key != MANIFEST]) == 1


# -- what is there already ---------------------------------------------------------------------------------------------


def test_a_directory_with_other_things(tmp_path: Path) -> None:
    """Readers find no checkpoint there; a save adds one and keeps the other files."""
    (tmp_path / "notes.txt").write_text("a file")
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "model.bin").write_text("another file")
    for read in (bcp.open, lambda path: bcp.load(path, _tree(value=1))):
        with pytest.raises(NotACheckpointError, match=r"no manifest.msgpack but holds notes.txt, step-10/") as caught:
            read(tmp_path)
        assert "did you mean one of step-10/ below it?" in str(caught.value)
    bcp.save(tmp_path, _tree(value=1))
    bcp.save(tmp_path, _tree(value=2))
    assert _value(tmp_path) == 2
    assert (tmp_path / "notes.txt").read_text() == "a file"
    assert (tmp_path / "step-10" / "model.bin").read_text() == "another file"


def test_nothing_there(tmp_path: Path) -> None:
    state = _tree(value=1)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*nowhere: nothing is stored there"):
        bcp.load(tmp_path / "nowhere", state)
    assert state == _tree(value=1)


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    bcp.save(path, _tree(value=1, weight=torch.ones(3)))
    return path


def test_a_newer_format_version(committed: Path) -> None:
    """The message names both versions; a save replaces it and keeps the files that it could not understand."""
    file = committed / MANIFEST
    raw = file.read_bytes()
    file.write_bytes(with_version(raw, 3))
    for read in (bcp.open, lambda path: bcp.load(path, _tree(value=1, weight=torch.zeros(3)))):
        with pytest.raises(UnsupportedVersionError, match=r"version 3\b.*\b1\b") as caught:
            read(committed)
        assert str(file) in str(caught.value)
    before = set(keys_of(committed))
    bcp.save(committed, _tree(value=5))
    assert _value(committed) == 5
    assert before <= set(keys_of(committed))


@pytest.mark.parametrize("keep", [0, 1, 8, 24, 40, -1])
def test_a_manifest_cut_short(committed: Path, keep: int) -> None:
    file = committed / MANIFEST
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        bcp.open(committed)
    state = _tree(value=7, weight=torch.zeros(3))
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        bcp.load(committed, state)
    assert state["extra_state"]["value"] == 7
    bcp.save(committed, _tree(value=2))
    assert _value(committed) == 2


def test_a_manifest_that_is_something_else(committed: Path) -> None:
    for content in (b"{}", msgpack.packb({"version": 1}), os.urandom(300)):
        (committed / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(str(committed / MANIFEST))):
            bcp.open(committed)
