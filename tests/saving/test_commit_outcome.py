"""What the ranks say of a save when one of them is lost or late around the commit: never the opposite of the truth."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint import checkpointer, telemetry
from bytecheckpoint.errors import BytecheckpointError, CommitUnknownError, StorageError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


def _state(rank: int, value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"w{rank}": torch.full((10,), value)}}


def _die_after_confirm(rank: int, world_size: int, path: str) -> tuple[str, set[str]]:
    """Rank 2 dies when it has confirmed; rank 0 commits when it is gone."""
    bcp.save(path, _state(rank, 1.0), deadline_s=time_limit(30))
    old = set(os.listdir(path)) - {"manifest.msgpack"}
    dist.barrier()
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())

    def observer(name: str, event: str) -> None:
        if rank == 2 and (name, event) == ("save.confirm", "exit"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and (name, event) == ("save.commit.before", "point"):
            while _runs(pids[2]):
                os.sched_yield()

    telemetry.observe(observer)
    try:
        bcp.save(path, _state(rank, 2.0), step=2, deadline_s=time_limit(30))
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}", set()
    return "saved", old & set(os.listdir(path)) if rank == 0 else set()


def _runs(pid: object) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go while it is read
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_rank_that_dies_after_confirming_cannot_undo_the_save(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_die_after_confirm, str(tmp_path), expect_death={2: signal.SIGKILL})
    assert results[:2] == [("saved", set())] * 2
    checkpoint = bcp.open(tmp_path)
    assert checkpoint.step == 2
    assert checkpoint.verify().ok


def _commit_late(rank: int, world_size: int, path: str) -> str:
    """Rank 0's store takes the manifest only when the others have given up."""
    rule = FaultRule("put", "manifest.msgpack", hook=lambda call: dist.barrier())
    real = checkpointer.open_backend
    if rank == 0:
        checkpointer.open_backend = lambda url, **options: FaultyBackend(real(url, **options), [rule])
    try:
        bcp.save(path, _state(rank, 1.0), step=1, deadline_s=time_limit(30) if rank == 0 else 1)
        return "saved"
    except CommitUnknownError as error:
        return f"unknown: {error}"
    finally:
        checkpointer.open_backend = real
        if rank:
            dist.barrier()


def test_ranks_that_gave_up_on_a_late_commit_do_not_say_that_it_failed(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_commit_late, str(tmp_path), world_size=2)
    assert results[0] == "saved"
    assert results[1].startswith("unknown: ")
    assert "waited 1 s in committed for rank(s) 0" in results[1]
    assert bcp.open(tmp_path).verify().ok


def _lose_rank_0_and_the_store(rank: int, world_size: int, path: str) -> str:
    """Rank 0 dies right after it has written the manifest; then rank 1's store fails too."""
    rule = FaultRule("get", "manifest.msgpack", times=None, error=StorageError("no answer"))
    real = checkpointer.open_backend
    if rank == 1:
        checkpointer.open_backend = lambda url, **options: FaultyBackend(real(url, **options), [rule])

    def observer(name: str, event: str) -> None:
        if rank == 0 and (name, event) == ("save.commit.after", "point"):
            os.kill(os.getpid(), signal.SIGKILL)

    stop = telemetry.observe(observer)
    try:
        bcp.save(path, _state(rank, 1.0), step=1, deadline_s=time_limit(30))
    except BytecheckpointError as error:
        return f"{type(error).__name__}, {error.may_have_committed}: {error}"
    finally:
        stop()
        checkpointer.open_backend = real
    return "saved"


def test_the_outcome_is_unknown_if_rank_0_and_the_store_are_lost(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(_lose_rank_0_and_the_store, str(tmp_path), world_size=2, expect_death={0: signal.SIGKILL})
    assert outcomes[1].startswith("CommitUnknownError, True: ")
    assert bcp.open(tmp_path).verify().ok, "the checkpoint exists, and none of its files was removed"


def _destroy_group_in_flight(rank: int, world_size: int, path: str) -> str:
    """The others ask whether it was committed only when rank 0 has left the group and made another save without it."""
    moved_on = Path(path, "alone-0", "manifest.msgpack")

    def observer(name: str, event: str) -> None:
        while rank and (name, event) == ("save.confirm", "exit") and not moved_on.exists():
            os.sched_yield()

    stop = telemetry.observe(observer)
    handle = bcp.save(f"{path}/together", _state(rank, 1.0), async_save=True, deadline_s=time_limit(30))
    dist.destroy_process_group()
    if rank == 0:
        handle.result(time_limit(30))
    bcp.save(f"{path}/alone-{rank}", _state(rank, 2.0), async_save=True)
    error = handle.exception(30)
    stop()
    return repr(error)


def test_a_group_that_is_destroyed_takes_no_save_with_it(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_destroy_group_in_flight, str(tmp_path)) == ["None"] * 3
    assert bcp.open(tmp_path / "together").verify().ok


def test_a_synchronous_save_in_a_callback_is_refused(tmp_path: Path) -> None:
    """It would wait for the thread that it runs on, for ever."""
    results: list[str] = []
    ended = threading.Event()

    def again(handle: bcp.SaveHandle) -> None:
        try:
            checkpointer.save(tmp_path / "b", _state(0, 2.0))
        except UsageError as error:
            results.append(str(error))
            checkpointer.save(tmp_path / "c", _state(0, 3.0), async_save=True).add_done_callback(lambda _: ended.set())

    with bcp.Checkpointer() as checkpointer:
        go_on = threading.Event()
        stop = telemetry.observe(
            lambda name, event: go_on.wait(time_limit(10)) and None if name == "save.write" else None
        )
        handle = checkpointer.save(tmp_path / "a", _state(0, 1.0), async_save=True)
        handle.add_done_callback(again)
        go_on.set()
        assert ended.wait(time_limit(30))
        stop()
    assert "async_save=True" in results[0]
    assert bcp.open(tmp_path / "c").verify().ok
    assert not (tmp_path / "b").exists()


def test_a_closed_checkpointer_refuses_everything(tmp_path: Path) -> None:
    checkpointer = bcp.Checkpointer()
    checkpointer.save(tmp_path, _state(0, 1.0), step=1)
    checkpointer.close()
    for use in (
        lambda: checkpointer.save(tmp_path, _state(0, 2.0), step=2),
        lambda: checkpointer.load(tmp_path, _state(0, 0.0)),
        lambda: checkpointer.open(tmp_path),
    ):
        with pytest.raises(UsageError, match="is closed"):
            use()
    assert bcp.open(tmp_path).step == 1
