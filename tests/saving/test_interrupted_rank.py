"""A rank that gives a queued save up tells the others, which do not wait for it until the deadline."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from small_training import training

import bytecheckpoint as bcp
from bytecheckpoint import saving, trace
from bytecheckpoint.errors import RankFailedError
from bytecheckpoint.testing.ranks import RankPool

_DEADLINE_S = 120.0


def _save_twice(rank: int, world_size: int, path: str) -> Any:
    """Rank 1 is interrupted while its second save waits behind the first, which it holds."""
    go_on = threading.Event()
    stop = trace.observe(lambda name, event: go_on.wait(60) if rank == 1 and name == "save.write" else None)
    real = saving._SaveJob.wait

    def interrupted(job: Any) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        job._ended.result = interrupt
        real(job)

    with bcp.Checkpointer() as saver:
        first = saver.save(f"{path}/0", training(1.0), async_save=True, deadline_s=_DEADLINE_S)
        if rank == 1:
            saving._SaveJob.wait = interrupted
        try:
            saver.save(f"{path}/1", training(2.0), deadline_s=_DEADLINE_S)
            said = "saved"
        except KeyboardInterrupt:
            said = "interrupted"
        except RankFailedError as error:
            said = f"rank {error.rank}: {error.phase}"
        finally:
            saving._SaveJob.wait = real
            go_on.set()
            stop()
        first.result(_DEADLINE_S)
        saver.save(f"{path}/2", training(3.0), deadline_s=_DEADLINE_S)
    return said


def test_an_interrupted_rank_is_named_by_the_others(rank_pool: RankPool, tmp_path: Path) -> None:
    # Less than the deadline of a wait: a rank that was told of nothing would still be waiting.
    assert rank_pool.run(_save_twice, str(tmp_path), world_size=2, timeout_s=60) == ["rank 1: write", "interrupted"]
    assert bcp.open(tmp_path / "0").verify().ok
    assert bcp.open(tmp_path / "2").verify().ok
    assert not (tmp_path / "1" / "manifest.msgpack").exists()
