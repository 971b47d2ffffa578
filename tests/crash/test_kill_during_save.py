"""Kill the first save of a job: its attempt is not a checkpoint.

``test_failure_matrix.py`` covers the cases in which an earlier checkpoint exists.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from crash_state import NEW, new_state

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import NotACheckpointError, NoValidCheckpointError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 2


def _die_first(rank: int, world_size: int, path: str) -> None:
    def kill(name: str, event: str) -> None:
        if rank == 0 and name == "save.commit":
            os.kill(os.getpid(), signal.SIGKILL)

    telemetry.observe(kill)
    with pytest.raises(bcp.errors.RankFailedError):
        bcp.save(path, new_state(NEW), options=bcp.SaveOptions(deadline_s=time_limit(30)))


def test_a_killed_first_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    with RankPool(WORLD) as pool:
        pool.run(_die_first, str(tmp_path / "step-1"), expect_death={0: signal.SIGKILL})
    with pytest.raises(NotACheckpointError, match="none was committed"):
        bcp.open(tmp_path / "step-1")
    with pytest.raises(NoValidCheckpointError, match="step-1"):
        bcp.latest(tmp_path)
    assert bcp.latest(tmp_path, allow_fresh=True) is None
