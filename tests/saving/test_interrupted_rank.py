"""A rank that withdraws a queued save reports that to the others, which then do not wait until the deadline."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from small_training import training

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import RankFailedError
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

_DEADLINE_S = time_limit(120)


def _save_twice(rank: int, world_size: int, path: str) -> Any:
    """Rank 1 is interrupted while its second save is queued behind the first, which this function holds."""
    go_on = threading.Event()
    stop = telemetry.observe(
        lambda name, event: go_on.wait(time_limit(60)) if rank == 1 and name == "save.write" else None
    )
    with bcp.Checkpointer() as saver:
        first = saver.save(f"{path}/0", training(1.0), async_save=True, options=bcp.SaveOptions(deadline_s=_DEADLINE_S))
        try:
            with mock.patch.object(SaveHandle, "result", side_effect=KeyboardInterrupt) if rank == 1 else nullcontext():
                saver.save(f"{path}/1", training(2.0), options=bcp.SaveOptions(deadline_s=_DEADLINE_S))
            outcome = "saved"
        except KeyboardInterrupt:
            outcome = "interrupted"
        except RankFailedError as error:
            outcome = f"rank {error.rank}: {error.phase}"
        finally:
            go_on.set()
            stop()
        first.result(_DEADLINE_S)
        saver.save(f"{path}/2", training(3.0), options=bcp.SaveOptions(deadline_s=_DEADLINE_S))
    return outcome


def test_an_interrupted_rank_is_named_by_the_others(rank_pool: RankPool, tmp_path: Path) -> None:
    # Shorter than the deadline of a wait: without the report, the other rank would still be waiting.
    assert rank_pool.run(_save_twice, str(tmp_path), world_size=2, timeout_s=time_limit(60)) == [
        "rank 1: write",
        "interrupted",
    ]
    assert bcp.open(tmp_path / "0").verify().ok
    assert bcp.open(tmp_path / "2").verify().ok
    assert not (tmp_path / "1" / "manifest.msgpack").exists()
