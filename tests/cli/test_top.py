"""``bcp top``, and what a shell completes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import CommandResult

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.attempts import attempt_name
from bytecheckpoint.testing import time_limit

Run = Callable[..., CommandResult]


@pytest.mark.parametrize("base", [None, "auto"])
def test_a_job_and_what_it_saves(tmp_path: Path, bcp_command: Run, base: str | None) -> None:
    root = tmp_path / "root"
    with bcp.CheckpointManager(root, cadence=1, async_save=False, save=bcp.SaveOptions(base=base)) as manager:
        for step in (10, 30):
            manager.save(step, {"extra_state": {"step": step}})
        later = attempt_name(b"\0" + (int(time.time()) + 60).to_bytes(7, "big") + b"12345678")
        begun = root / ("step-40" if base is None else "objects") / later / "model-00000.safetensors"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"half")
        found = bcp_command("top", root, "--json").json
        assert found["job"]["pid"] == os.getpid()
        assert f"process {os.getpid()} on" in bcp_command("top", root).stdout
    newest = found["newest"]
    assert (newest["name"], set(newest["slowest"]) > {"plan", "write"}) == ("step-30", True)
    assert newest["seconds"] >= newest["stall"] > 0
    created = [one["created"] for one in bcp_command("ls", root, "--json").json["entries"] if "created" in one]
    assert (len(created), newest["created"]) == (2, created[1])
    assert found["steps_per_s"] == pytest.approx(20 / found["every_s"])
    assert [one["name"] for one in found["saving"]] == [begun.parents[1].name]
    ended = bcp_command("top", root)
    assert "none holds the root" in ended.stdout
    assert "in progress" in ended.stdout


def test_a_root_without_checkpoints(tmp_path: Path, bcp_command: Run) -> None:
    with bcp.CheckpointManager(tmp_path):
        found = bcp_command("top", tmp_path, "--json").json
    assert (found["newest"], found["every_s"], found["saving"]) == (None, None, [])
    assert bcp_command("top", tmp_path / "none").code == 3


@pytest.mark.parametrize(
    ("words", "completed"),
    [(["bcp", "la"], "latest"), (["bcp", "ls", "--dep"], "--depth"), (["bcp", "ls", "run"], "paths")],
)
def test_a_shell_completes(tmp_path: Path, words: list[str], completed: str) -> None:
    """A path is left to the shell itself."""
    (tmp_path / "runs").mkdir()
    script = (
        'eval "$(_BCP_COMPLETE=bash_source bcp)"; compopt() { echo paths; }; '
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _bcp_completion bcp; echo ${{COMPREPLY[*]}}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        timeout=time_limit(60),
        check=True,
    )
    assert done.stdout.split() == [completed]
