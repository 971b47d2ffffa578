"""SIGKILL where nothing was ever saved: what is there then is no checkpoint, and says so.

``test_failure_matrix.py`` has all else, with a checkpoint beside or below.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from crash_state import NEW, new_state

import bytecheckpoint as bcp
from bytecheckpoint import trace
from bytecheckpoint.errors import NotACheckpointError, NoValidCheckpointError
from bytecheckpoint.testing.ranks import RankPool

WORLD = 2


def _die_first(rank: int, world_size: int, path: str) -> None:
    def kill(name: str, event: str) -> None:
        if rank == 0 and name == "save.commit":
            os.kill(os.getpid(), signal.SIGKILL)

    trace.observe(kill)
    with pytest.raises(bcp.errors.RankFailedError):
        bcp.save(path, new_state(NEW), deadline_s=30)


def test_first_save_killed_is_no_checkpoint(tmp_path: Path) -> None:
    with RankPool(WORLD) as pool:
        pool.run(_die_first, str(tmp_path / "step-1"), expect_death={0: signal.SIGKILL})
    with pytest.raises(NotACheckpointError, match="none was committed"):
        bcp.open(tmp_path / "step-1")
    with pytest.raises(NoValidCheckpointError, match="step-1"):
        bcp.latest(tmp_path)
    assert bcp.latest(tmp_path, allow_fresh=True) is None
