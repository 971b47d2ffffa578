"""What the ranks do in one cell of the failure matrix, and what they have to tell."""

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
from crash_faults import Fault, Watch, continued
from crash_holdings import Holdings, left_since
from crash_job import Job, new_job
from crash_state import NEW, NEXT, PREVIOUS, empty_state, new_state, value_of

from bytecheckpoint.errors import BytecheckpointError, CommitUnknownError, DeadlineError, RankFailedError
from bytecheckpoint.manager.lease import LEASE_KEY
from bytecheckpoint.storage_backends.keys import TEMPORARY

PREVIOUS_STEP, NEW_STEP = 1, 2
DEADLINE_S = 20.0
SHORT_DEADLINE_S = 1.5
"""Where a rank is to be found missing."""

_VANISHED = os.strerror(errno.ENOENT)


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended: "done", or the error's class and first line; the rank, host and phase that it names,
    -1 where it names none. ``ended`` is on the clock that all processes of a machine share."""

    said: str
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
        told: BaseException | None = error
        while told is not None and not (isinstance(told, RankFailedError) and told.rank >= 0):
            told = told.__cause__
        where = (told.rank, told.host, told.phase) if isinstance(told, RankFailedError) else (-1, "", "")
        return cls(type(error).__name__, str(error).splitlines()[0], *where, in_doubt=in_doubt, ended=ended)


@dataclass(frozen=True)
class Story:
    """Of one rank that lived. ``pids`` are of all ranks; ``left`` is what it holds more than before; ``after`` the save
    that its next call stored and loaded again, where all ranks lived; ``buried`` when the one that was killed ended."""

    outcome: Outcome
    pids: list[int]
    left: list[str]
    after: float | None = None
    buried: float | None = None


def deadline_of(cell: Cell) -> float:
    return SHORT_DEADLINE_S if cell.fault in ("stop", "rank-0-only") else DEADLINE_S


def step_of(cell: Cell) -> int:
    """The step that the call is about."""
    return NEW_STEP if cell.where == "new" else PREVIOUS_STEP


def live_through(rank: int, world_size: int, cell: Cell, root: str, scratch: str) -> Story:
    """Save and load in good health, then live through ``cell``; if all ranks do, go on with the next save.

    ``root`` as the failure left it is copied to ``<scratch>/after`` then.
    """
    _prepare(cell, root)
    before = Holdings.now()
    pids = _exchange(os.getpid())
    dist.barrier()
    victim = cell.victim_of(world_size)
    is_victim = rank == (0 if cell.fault == "rank-0-only" else victim)
    is_watcher = cell.fault == "stop" and not is_victim
    is_astray = is_victim and cell.fault == "divergent-path"
    job = new_job(cell.mode, root + "-astray" if is_astray else root, deadline_s=deadline_of(cell), layout=cell.layout)
    dist.barrier()
    struck = Path(scratch) / "struck"
    watch = Watch(pids[victim]) if cell.kills and not is_victim else None
    with continued(pids[victim], struck, deadline_of(cell)) if is_watcher else nullcontext():
        outcome, error = _call(cell, job, root, struck, rank, is_victim)
    if cell.kills:
        with suppress(BytecheckpointError):
            job.leave(error or RuntimeError("another rank is gone"))
        del job, error
        buried = None if watch is None else watch.ended()
        return Story(outcome, pids, left_since(before), buried=buried)
    del error
    dist.barrier()
    if rank == 0:
        _copy_all(Path(root), Path(scratch) / "after")
    dist.barrier()
    if deadline_of(cell) != DEADLINE_S or cell.fault == "divergent-path":
        # Not to be hurried any more: new connections may take a second.
        with suppress(BytecheckpointError):
            job.close()
        job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    is_done = any(_exchange(int(outcome.said == "done")))
    after = _go_on(job, step_of(cell) + (10 if is_done else 0))
    job.close()
    del job
    dist.barrier()
    return Story(outcome, pids, left_since(before), after)


def live_on(rank: int, world_size: int, cell: Cell, root: str) -> tuple[float, float]:
    """The next job, in new processes: the save that it finds where the failure was, and the one it makes there."""
    job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    state = empty_state()
    job.load(PREVIOUS_STEP, state)
    found = value_of(state)
    made = _go_on(job, step_of(cell))
    job.close()
    return found, made


def _copy_all(root: Path, target: Path) -> None:
    """A manager's housekeeping may be removing what a dead job left."""
    while True:
        try:
            # The manager's lease is rewritten all the time.
            shutil.copytree(root, target, ignore=shutil.ignore_patterns(f"{TEMPORARY}*", LEASE_KEY))
        except shutil.Error as error:
            if not all(_VANISHED in why for _, _, why in error.args[0]):
                raise
            shutil.rmtree(target)
        else:
            return


def _prepare(cell: Cell, root: str) -> None:
    """Store ``PREVIOUS``, in the way of the cell, so that whatever is made once is made now."""
    job = new_job(cell.mode, root, deadline_s=DEADLINE_S, layout=cell.layout)
    job.save(PREVIOUS_STEP, new_state(PREVIOUS))
    state = empty_state()
    job.load(PREVIOUS_STEP, state)
    assert value_of(state) == PREVIOUS
    job.close()


def _call(
    cell: Cell, job: Job, root: str, struck: Path, rank: int, is_victim: bool
) -> tuple[Outcome, BytecheckpointError | None]:
    state = new_state(NEW) if cell.operation == "save" else empty_state()
    if is_victim and cell.fault == "divergent-keys":
        state["scheduler"] = {"step": 1}
    fault = Fault(cell, f"{root}/step-{step_of(cell)}", struck)
    if cell.fault == "rank-0-only" and rank != 0:
        dist.barrier()  # it comes when rank 0 has given up
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
    if cell.operation == "load" and outcome.said == "done":
        assert value_of(state) == PREVIOUS
    return outcome, raised


def _go_on(job: Job, step: int) -> float:
    """Save and load once more."""
    job.save(step, new_state(NEXT))
    state = empty_state()
    job.load(step, state)
    return value_of(state)


def _exchange(number: int) -> list[int]:
    """One number of every rank, by rank."""
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([number]))
    return [int(one) for one in everyone]
