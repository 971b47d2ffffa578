"""What the commands show and do about incremental checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.checkpointer import session_of

CHUNK = 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of three checkpoints: the first is complete, each of the others changes one chunk."""
    session_of().engine.shared.last_commit = None
    tensor = torch.zeros(100 * CHUNK // 4)
    for step in (1, 2, 3):
        tensor[step * CHUNK // 4] = step
        state = {"model": {"w": tensor}}
        bcp.save(tmp_path / f"step-{step}", state, step=step, options=bcp.SaveOptions(base="auto", chunk_size=CHUNK))
    return tmp_path


def test_inspect_shows_what_is_shared_and_with_which_saves(root: Path, bcp_command: Any) -> None:
    shared = json.loads(bcp_command("inspect", root / "step-3", "--json").stdout)["shared"]
    first, second = (bcp.open(root / f"step-{step}").manifest.attempt for step in (1, 2))
    # The first save has the chunks 2 and 3 as zeros, the second one has chunk 2 as it is now.
    assert {one["attempt"]: one["bytes"] for one in shared} == {first: 98 * CHUNK, second: CHUNK}
    assert f"shared: 98.0 KiB are in files of {first}" in bcp_command("inspect", root / "step-3").stdout
    assert json.loads(bcp_command("inspect", root / "step-1", "--json").stdout)["shared"] == []


def test_rm_keeps_what_others_need_until_the_last_of_them_is_removed(root: Path, bcp_command: Any) -> None:
    ran = bcp_command("rm", root / "step-1", "--yes", "--json")
    assert ran.code == 0
    document = json.loads(ran.stdout)
    assert (document["files"], document["left"], document["problem"]) == (0, [], "")
    listed = json.loads(bcp_command("ls", root, "--json").stdout)
    assert [(one["name"], one["status"]) for one in listed["entries"]] == [
        ("step-2", "checkpoint"),
        ("step-3", "checkpoint"),
    ]
    ran = bcp_command("inspect", root / "step-1")
    assert ran.code != 0
    assert bcp_command("verify", root / "step-3").code == 0
    assert bcp_command("rm", root / "step-3", "--yes").code == 0
    assert bcp_command("verify", root / "step-2").code == 0
    assert "2 file(s) removed" in bcp_command("rm", root / "step-2", "--yes").stdout
    assert not [*root.iterdir()]


def test_copy_makes_a_full_copy(root: Path, bcp_command: Any, tmp_path: Path) -> None:
    ran = bcp_command("copy", root / "step-3", root / "full", "--json")
    assert ran.code == 0
    assert json.loads(ran.stdout)["bytes"] > 100 * CHUNK
    assert bcp_command("diff", root / "step-3", root / "full").code == 0
    for step in (1, 2, 3):
        assert bcp_command("rm", root / f"step-{step}", "--yes").code == 0
    assert bcp_command("verify", root / "full").code == 0
    assert json.loads(bcp_command("inspect", root / "full", "--json").stdout)["shared"] == []
