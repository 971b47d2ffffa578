"""What ``--incomplete`` shows and removes of saves that were killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import CommandResult
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.lease import hold_root
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit

Run = Callable[..., CommandResult]

_KILLED = """
import os, signal, sys
import torch
import bytecheckpoint as bcp
os.fdatasync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
bcp.save(sys.argv[1], {"model": {"w": torch.ones(100)}}, options={"base": "auto"} if sys.argv[2] == "shared" else None)
"""


@pytest.fixture(params=["own", "shared"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A committed checkpoint, and what a killed save has left in its folder and in another one; or shared files."""
    root = tmp_path / "root"
    bcp.save(root / "step-1", {"extra_state": {"step": 1}}, step=1)
    for name in ("step-1", "step-2"):
        done = warm_python().run(["-c", _KILLED, str(root / name), request.param], timeout=time_limit(120))
        assert done.returncode == -signal.SIGKILL, done.stderr
    return root


def test_what_killed_saves_left_is_removed(root: Path, bcp_command: Run) -> None:
    committed = f"step-1/{bcp.open(root / 'step-1').manifest.attempt}"
    left = {"/".join(path.relative_to(root).parts) for path in root.glob("*/attempt-*")} - {committed}
    assert len(left) == 2
    listed = {one["name"] for one in bcp_command("ls", root, "--incomplete", "--json").json["attempts"]}
    assert listed == {name for name in left if not name.startswith("objects/")}
    kept = bcp_command("rm", root, "--incomplete", "--yes", "--json").json
    assert (kept["removed"], kept["younger"], kept["swept"]["files"]) == ([], len(listed), 0)

    with hold_root(open_backend(root), patience_s=0):
        held = bcp_command("rm", root, "--incomplete", "--yes", "--older-than", 0)
    assert "may remain" in held.stdout
    assert left <= {"/".join(path.relative_to(root).parts) for path in root.glob("*/attempt-*")}

    done = bcp_command("rm", root, "--incomplete", "--yes", "--older-than", 0)
    assert done.code == 0, done.stderr
    assert sorted("/".join(path.relative_to(root).parts) for path in root.glob("*/*")) == [
        committed,
        "step-1/manifest.msgpack",
    ]
    assert bcp.open(root / "step-1").verify().ok
    assert bcp_command("ls", root / "none", "--incomplete").stdout.endswith("nothing is incomplete\n")
