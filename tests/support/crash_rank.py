"""The ranks' side of one cell of the failure matrix: run the calls, and report the outcome."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from crash_cells import Cell
from crash_faults import Fault, ProcessWatch, continue_afterwards
from crash_job import Job, new_job
from crash_state import NEW, NEXT, PREVIOUS, empty_state, new_state, value_of
from leak_watch import held_now, left_since

from bytecheckpoint.checkpoint.lease import LEASE_KEY
from bytecheckpoint.errors import BytecheckpointError, CommitUnknownError, DeadlineError, RankFailedError
from bytecheckpoint.storage_backends.keys import TEMPORARY_PREFIX
from bytecheckpoint.testing import time_limit

PREVIOUS_STEP, NEW_STEP = 1, 2
DEADLINE_S = time_limit(20)
SHORT_DEADLINE_S = time_limit(1.5)
"""For cells in which ranks must detect that another one is missing."""

_VANISHED = os.strerror(errno.ENOENT)


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended.

    ``result`` is "done" or the class of the error, ``line`` the first line of its message. ``rank`` (-1 for none),
    ``host`` and ``phase`` are those that the error names. All processes of a machine share the clock of ``ended``.
    """

    result: str
    line: str = ""
    rank: int = -1
    host: str = ""
    phase: str = ""
    in_doubt: bool = False
    ended: float = field(default_factory=time.monotonic)

    @classmethod
    def of_error(cls, error: BytecheckpointError, ended: float) -> Outcome:
        in_doubt = isinstance(error, CommitUnknownError)
        if in_doubt and isinstance(error.__cause__, DeadlineError):
            error = error.__cause__
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, RankFailedError) and cause.rank >= 0):
            cause = cause.__cause__
        where = (cause.rank, cause.host, cause.phase) if isinstance(cause, RankFailedError) else (-1, "", "")
        return cls(type(error).__name__, str(error).splitlines()[0], *where, in_doubt=in_doubt, ended=ended)


@dataclass(frozen=True)
class RankReport:
    """The report of a surviving rank.

    ``pids`` are the process ids of all ranks, ``leaked`` the resources that the rank holds in addition to those before.
    ``after`` is the value that the next call saved and loaded, if all ranks survived. ``victim_ended`` is the time at
    which the killed process ended.
    """

    outcome: Outcome
    pids: list[int]
    leaked: list[str]
    after: float | None = None
    victim_ended: float | None = None


def deadline_of(cell: Cell) -> float:
    return SHORT_DEADLINE_S if cell.fault in ("stop", "rank-0-only") else DEADLINE_S


def step_of(cell: Cell) -> int:
    """Return the step of the call."""
    return NEW_STEP if cell.where == "new" else PREVIOUS_STEP


def run_cell(rank: int, world_size: int, cell: Cell, root: str, scratch: str) -> RankReport:
    """Save and load normally, then run the fault of ``cell``, and make the next save if all ranks survive.

    In that case, ``root`` is copied to ``<scratch>/after`` as the fault left it.
    """
    _prepare(cell, root)
    before = held_now()
    pids = _exchange(os.getpid())
    dist.barrier()
    victim = cell.victim_of(world_size)
    is_victim = rank == (0 if cell.fault == "rank-0-only" else victim)
    is_watcher = cell.fault == "stop" and not is_victim
    has_other_path = is_victim and cell.fault == "divergent-path"
    job = new_job(
        cell.mode, root + "-other" if has_other_path else root, deadline_s=deadline_of(cell), layout=cell.layout
    )
    # Before the barrier: the victim may be killed as soon as it has passed it.
    watch = ProcessWatch(pids[victim]) if cell.kills and not is_victim else None
    dist.barrier()
    fault_time = Path(scratch) / "fault-time"
    with continue_afterwards(pids[victim], fault_time, deadline_of(cell)) if is_watcher else nullcontext():
        outcome, error = _call(cell, job, root, fault_time, rank, is_victim)
    if cell.kills:
        with suppress(BytecheckpointError):
            job.leave(error or RuntimeError("another rank has died"))
        del job, error
        victim_ended = None if watch is None else watch.ended()
        return RankReport(outcome, pids, left_since(before), victim_ended=victim_ended)
    del error
    dist.barrier()
    if rank == 0:
        _copy_all(Path(root), Path(scratch) / "after")
    dist.barrier()
    if deadline_of(cell) != DEADLINE_S or cell.fault == "divergent-path":
        # From here on with the long deadline: new connections may take a second.
        with suppress(BytecheckpointError):
            job.close()
        job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    is_done = any(_exchange(int(outcome.result == "done")))
    after = _save_next(job, step_of(cell) + (10 if is_done else 0))
    job.close()
    del job
    dist.barrier()
    return RankReport(outcome, pids, left_since(before), after)


def run_next_job(rank: int, world_size: int, cell: Cell, root: str) -> tuple[float, float]:
    """Run the next job, in new processes, and return the value that it finds at the path and the one it saves."""
    job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    state = empty_state()
    job.load(PREVIOUS_STEP, state)
    found = value_of(state)
    saved = _save_next(job, step_of(cell))
    job.close()
    return found, saved


def _copy_all(root: Path, target: Path) -> None:
    """Copy everything; retry if a manager removes files of a dead job at the same time."""
    while True:
        try:
            # The manager rewrites its lease continuously.
            shutil.copytree(root, target, ignore=shutil.ignore_patterns(f"{TEMPORARY_PREFIX}*", LEASE_KEY))
        except shutil.Error as error:
            if not all(_VANISHED in reason for _, _, reason in error.args[0]):
                raise
            shutil.rmtree(target)
        else:
            return


def _prepare(cell: Cell, root: str) -> None:
    """Save ``PREVIOUS`` in the mode of the cell, which also allocates everything that is allocated once."""
    job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    job.save(PREVIOUS_STEP, new_state(PREVIOUS))
    state = empty_state()
    job.load(PREVIOUS_STEP, state)
    assert value_of(state) == PREVIOUS
    job.close()


def _call(
    cell: Cell, job: Job, root: str, fault_time: Path, rank: int, is_victim: bool
) -> tuple[Outcome, BytecheckpointError | None]:
    state = new_state(NEW) if cell.operation == "save" else empty_state()
    if is_victim and cell.fault == "divergent-keys":
        state["scheduler"] = {"step": 1}
    fault = Fault(cell, f"{root}/step-{step_of(cell)}", fault_time)
    if cell.fault == "rank-0-only" and rank != 0:
        dist.barrier()  # until rank 0 has given up
    if is_victim:
        fault.install()
    raised = None
    try:
        if cell.operation == "save":
            job.save(step_of(cell), state)
        else:
            job.load(PREVIOUS_STEP, state)
        outcome = Outcome("done")
    except BytecheckpointError as error:
        outcome, raised = Outcome.of_error(error, job.raised or time.monotonic()), error
    finally:
        fault.remove()
    if cell.fault == "rank-0-only" and rank == 0:
        dist.barrier()
    if cell.operation == "load" and outcome.result == "done":
        assert value_of(state) == PREVIOUS
    return outcome, raised


def _save_next(job: Job, step: int) -> float:
    """Save and load once more, and return the loaded value."""
    job.save(step, new_state(NEXT))
    state = empty_state()
    job.load(step, state)
    return value_of(state)


def _exchange(number: int) -> list[int]:
    """Return one number of every rank, by rank."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(one) for one in numbers]
