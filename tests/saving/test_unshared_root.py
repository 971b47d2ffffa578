"""Two ranks whose path is not the same folder: each has its own file system there, as two hosts with local disks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.slow

_RANK = """
import os, sys
import torch
import torch.distributed as dist
import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.saving import commit

commit._VISIBLE_S = 1.0
root, rank, is_own = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "own"
if is_own and rank:
    import ctypes
    assert ctypes.CDLL(None).mount(b"none", root.encode(), b"tmpfs", 0, b"size=8m") == 0
dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=2)
state = {"model": {"w": torch.ones(8)}, "extra_state": {"rank": rank}}
error = ""
for step in (1, 2):
    try:
        bcp.save(f"{root}/step-{step}", state)
    except StorageError as caught:
        error = str(caught)
print("error:", error)
print("left:", sorted(path for path, _, files in os.walk(root) for _ in files), rank)
dist.barrier()
"""


def _run(tmp_path: Path, *, is_own: bool) -> list[str]:
    """Return what each rank prints."""
    root = tmp_path / "root"
    root.mkdir()
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, "-W", "ignore", str(script), str(root)]
    ranks = [
        subprocess.Popen(
            ["unshare", "-m", *command, str(rank), "own" if is_own else "shared", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=time_limit(100)) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [output for output, _ in outputs]


@pytest.fixture(autouse=True)
def may_unshare() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0 or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("needs the right to make mount namespaces")


def test_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    first, second = _run(tmp_path, is_own=True)
    for output in (first, second):
        assert "is not the same folder on all hosts" in output
        assert "of rank 1" in output
        assert "left: []" in output, "no file remains"


def test_a_shared_folder_is_accepted(tmp_path: Path) -> None:
    for output in _run(tmp_path, is_own=False):
        assert "error: \n" in output
        assert "step-1" in output.partition("left:")[2]
        assert "step-2" in output.partition("left:")[2]
