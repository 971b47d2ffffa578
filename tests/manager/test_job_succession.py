"""Two jobs that take turns below one root: one holds it, the other waits, takes over, and gives it back.

Every rank is a job of its own here: ``dist.barrier`` only orders what they do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sorted_arguments import managing

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint.lease import LeaseRecord
from bytecheckpoint.control.base import SingleProcess
from bytecheckpoint.errors import RootInUseError, StorageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

DEADLINE_S = time_limit(20)
LEASE_S = time_limit(0.6)


class Job:
    """A job of one process."""

    def __init__(self, root: str) -> None:
        self.saver = bcp.Checkpointer(communicator=SingleProcess())
        self.options: dict[str, Any] = {"checkpointer": self.saver, "cadence": 1, "preemption": None}
        self.root = root

    def begin(self) -> tuple[bcp.CheckpointManager, float]:
        """The manager, and the value with which the job resumes."""
        manager = bcp.CheckpointManager(self.root, **managing(lease_s=LEASE_S, deadline_s=DEADLINE_S, **self.options))
        state = _state(0.0)
        manager.resume(state)
        return manager, state["extra"]["value"]

    def is_refused(self) -> bool:
        try:
            self.begin()[0].close()
        except RootInUseError as error:
            return "is in use by job" in str(error)
        return False


def _state(value: float) -> dict[str, Any]:
    return {"extra": {"value": value, "table": torch.full((1000,), value)}}


def _save(manager: bcp.CheckpointManager, step: int) -> None:
    manager.save(step, _state(float(step)))
    manager.wait()


def _take_turns(rank: int, world_size: int, root: str) -> list[Any]:
    """Job 0 saves steps 1 and 2, job 1 step 3, and job 0 step 4."""
    job, seen = Job(root), []
    with job.saver:
        if rank == 0:
            manager, value = job.begin()
            seen.append(value)
            _save(manager, 1)
            dist.barrier()  # the other is refused
            _save(manager, 2)
            dist.barrier()
            manager.close()
            dist.barrier()  # the other takes over
            dist.barrier()
            seen.append(job.is_refused())
            dist.barrier()  # the other ends
            dist.barrier()
            manager, value = job.begin()
            seen.append(value)
            _save(manager, 4)
            manager.close()
        else:
            dist.barrier()
            seen.append(job.is_refused())
            dist.barrier()
            dist.barrier()
            manager, value = job.begin()
            seen.append(value)
            _save(manager, 3)
            dist.barrier()
            dist.barrier()
            manager.close()
            dist.barrier()
    return seen


def _check(root: Path, steps: list[int]) -> None:
    """Nothing is lost, nothing is damaged, and nothing else is left."""
    found = sorted(root.glob("step-*/manifest.msgpack"))
    assert [path.parent.name for path in found] == [f"step-{step}" for step in steps]
    for step, path in zip(steps, found):
        checkpoint = bcp.open(path.parent)
        assert checkpoint.verify().ok
        assert checkpoint.tree("extra")["value"] == float(step)
        assert len(list(path.parent.iterdir())) == 2, "the manifest and its attempt"
    assert not (root / "lease.msgpack").exists()


def test_two_jobs_take_turns(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_take_turns, str(tmp_path), world_size=2)
    assert results == [[0.0, True, 3.0], [True, 2.0]]
    _check(tmp_path, [1, 2, 3, 4])


def _hold_write(then: Callable[[], None]) -> Callable[[], None]:
    once = [then]  # a save completes several files

    def observe(name: str, event: str) -> None:
        if (name, event) == ("save.write.complete", "point") and once:
            once.pop()()

    return telemetry.observe(observe)


def _die_while_saving(rank: int, world_size: int, root: str) -> list[Any]:
    """Job 0 is killed while it saves step 3. Job 1 takes over and saves step 3, then job 2, the restart of job 0, 4."""
    job, seen = Job(root), []
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    signals = Path(root).parent
    if rank == 0:
        manager, _ = job.begin()
        _save(manager, 1)
        _save(manager, 2)
        dist.barrier()  # job 1 is refused
        dist.barrier()
        _hold_write(lambda: os.kill(os.getpid(), signal.SIGKILL))
        _save(manager, 3)
    dist.barrier()
    if rank == 1:
        seen.append(job.is_refused())
    dist.barrier()
    if rank == 1:
        while not _has_ended(pids[0]):
            os.sched_yield()
        manager, value = job.begin()
        seen.append(value)
        _save(manager, 3)
        (signals / "taken").touch()
        while not (signals / "refused").exists():
            os.sched_yield()
        manager.close()
        (signals / "released").touch()
    else:
        while not (signals / "taken").exists():
            os.sched_yield()
        seen.append(job.is_refused())
        (signals / "refused").touch()
        while not (signals / "released").exists():
            os.sched_yield()
        manager, value = job.begin()
        seen.append(value)
        _save(manager, 4)
        manager.close()
    return seen


def _has_ended(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_job_takes_over_from_one_that_was_killed_while_it_saved(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with RankPool(3) as pool:
        results = pool.run(_die_while_saving, str(root), expect_death={0: signal.SIGKILL})
    assert results[1:] == [[True, 2.0], [True, 3.0]]
    _check(root, [1, 2, 3, 4])


def test_a_save_that_failed_because_the_root_was_lost(tmp_path: Path) -> None:
    """The other job may have removed the files of a save before this one's next heartbeat."""

    def lose() -> None:
        lease = tmp_path / "lease.msgpack"
        lease.write_bytes(replace(LeaseRecord.unpack(lease.read_bytes()), job=b"next").pack())
        raise StorageError("the folder is gone")

    manager = bcp.CheckpointManager(tmp_path, cadence=1, preemption=None, job=bcp.JobOptions(lease_s=600.0))
    stop = _hold_write(lose)
    handle = manager.save(1, _state(1.0))
    assert handle is not None
    assert isinstance(handle.exception(), StorageError)
    stop()
    with pytest.raises(RootInUseError, match="has taken this root over") as raised:
        manager.save(2, _state(2.0))
    assert isinstance(raised.value.__cause__, StorageError)
    manager.close()


def _suspend(rank: int, world_size: int, root: str) -> list[Any]:
    """Job 0 is suspended while it saves step 3; job 1 takes over and saves it; job 0 wakes up."""
    job, seen = Job(root), []
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    with job.saver:
        if rank == 0:
            manager, _ = job.begin()
            _save(manager, 1)
            _save(manager, 2)
            stop = _hold_write(lambda: os.kill(os.getpid(), signal.SIGSTOP))
            handle = manager.save(3, _state(-3.0))
            assert handle is not None
            # Its attempt is removed by the other job, so the lease may not be the first thing that it misses.
            seen.append(handle.exception() is not None)
            stop()
            for call in (lambda: manager.save(4, _state(-4.0)), manager.close):
                try:
                    call()
                except RootInUseError as error:
                    seen.append("has taken this root over" in str(error))
            seen.append(job.is_refused())
            dist.barrier()  # the other ends
            dist.barrier()
            manager, value = job.begin()
            seen.append(value)
            _save(manager, 4)
            manager.close()
        else:
            while not _is_stopped(pids[0]):
                os.sched_yield()
            try:
                # A thread of the other job may write a last heartbeat before it is stopped.
                while job.is_refused():
                    os.sched_yield()
                manager, value = job.begin()
                seen.append(value)
                _save(manager, 3)
            finally:
                os.kill(pids[0] or 0, signal.SIGCONT)
            dist.barrier()
            manager.close()
            dist.barrier()
    return seen


def _is_stopped(pid: object) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_job_takes_over_from_one_that_was_suspended_while_it_saved(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_suspend, str(tmp_path), world_size=2)
    assert results[1] == [2.0]
    assert results[0] == [True, True, True, 3.0]
    _check(tmp_path, [1, 2, 3, 4])
