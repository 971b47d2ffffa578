"""What ``bcp clean`` removes of saves that were killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import CommandResult
from tier_faults import failing_uploads
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import sweep
from bytecheckpoint.checkpoint.lease import hold_root
from bytecheckpoint.checkpoint.nearest import open_tier
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.transfer.journal import find_journals

pytestmark = pytest.mark.sampled(2, of=__name__)

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


def test_what_killed_saves_left_is_removed(root: Path, bcp_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PATIENCE_S", 0.2)
    committed = f"step-1/{bcp.open(root / 'step-1').manifest.attempt}"
    left = {"/".join(path.relative_to(root).parts) for path in root.glob("*/attempt-*")} - {committed}
    assert len(left) == 2
    shared = {name for name in left if name.startswith("objects/")}
    listed = bcp_command("clean", root, "--dry-run", "--older-than", 0, "--json").json
    assert {one["name"] for one in listed["attempts"]} == left - shared
    assert (listed["dry_run"], listed["shared"]["files"]) == (True, len(shared))
    kept = bcp_command("clean", root, "--json").json
    assert (kept["attempts"], kept["younger"], kept["shared"]["files"]) == ([], len(left - shared), 0)
    declined = bcp_command("clean", root, "--older-than", 0, input="n\n")
    assert (declined.code, "nothing removed" in declined.stderr) == (1, True)

    with hold_root(open_backend(root), patience_s=0):
        held = bcp_command("clean", root, "--yes", "--older-than", 0)
    assert "may remain" in held.stdout
    assert left <= {"/".join(path.relative_to(root).parts) for path in root.glob("*/attempt-*")}

    done = bcp_command("clean", root, "--yes", "--older-than", 0)
    assert done.code == 0, done.stderr
    assert sorted("/".join(path.relative_to(root).parts) for path in root.glob("*/*")) == [
        committed,
        "step-1/manifest.msgpack",
    ]
    assert bcp.open(root / "step-1").verify().ok
    assert "0 attempt(s) and 0 shared file(s) would be removed" in bcp_command("clean", root, "--dry-run").stdout


def test_what_a_tier_has_not_uploaded_is_listed(tmp_path: Path, bcp_command: Run) -> None:
    """A journal that is damaged makes ``bcp upload`` fail."""
    root = bcp.Location(tmp_path / "store", tier=bcp.Tier(tmp_path / "tier"))
    bcp.save(root.join("step-1"), {"extra": {"x": 1}}).uploaded()
    with failing_uploads():
        handle = bcp.save(root.join("step-2"), {"extra": {"x": 2}})
        with pytest.raises(StorageError, match="the store is broken"):
            handle.uploaded()
    folder = open_tier(tmp_path / "tier", root.open()).url
    assert "step-2: not uploaded completely from this machine" in bcp_command("ls", folder).stdout
    assert bcp_command("ls", folder, "--json").json["uploads_waiting"] == ["step-2"]
    assert bcp_command("ls", tmp_path / "store", "--json").json["uploads_waiting"] == []
    [(path, _)] = find_journals(folder)
    Path(path).write_bytes(b"")
    ended = bcp_command("upload", folder)
    assert ended.code == 2
    assert "is damaged" in ended.stderr
