"""What the failure matrix promises of a cell, and whether it was kept."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from crash_cells import Cell
from crash_rank import NEW_STEP, PREVIOUS_STEP, Outcome, Story, deadline_of, step_of
from crash_state import NEW, NEXT, PREVIOUS, stored_value

import bytecheckpoint as bcp
from bytecheckpoint.engine.writing.commit import read_manifest
from bytecheckpoint.manifest import MANIFEST_KEY
from bytecheckpoint.storage_backends.local import LocalBackend

GRACE_S = 2.0
"""After the deadline, everyone has raised."""

DEATH_NOTICED_S = 5.0
"""After the end of the process; long before the deadline, also on a busy machine."""

_CLASSES = {
    "raise": "RankFailedError",
    "unpicklable": "RankFailedError",
    "kill": "RankFailedError",
    "torn": "RankFailedError",
    "stop": "DeadlineError",
    "rank-0-only": "DeadlineError",
    "enospc": "StorageFullError",
    "eio": "StorageError",
    "eacces": "AccessDeniedError",
    "divergent-path": "DisagreementError",
    "divergent-keys": "DisagreementError",
}


def is_harmless(cell: Cell) -> bool:
    """Whether the checkpoint is committed, or will be, whatever the fault does."""
    if cell.point in ("save.clean", "save.clean:delete", "save.commit.after"):
        return True
    return (cell.fault, cell.point, cell.victim) in (("kill", "save.commit", "last"), ("stop", "save.commit", "last"))


def succeeds(cell: Cell) -> bool:
    """Whether every survivor's call does. A manager's does not where a rank is gone: all ranks settle what it did."""
    return is_harmless(cell) and not (cell.mode == "manager" and (cell.kills or cell.fault == "stop"))


def may_go_either_way(cell: Cell, outcomes: Sequence[Outcome]) -> bool:
    """Whether the commit is a race with the report of the fault: on a rank that has nothing to do any more but to hear
    of the commit, or where rank 0 was silent for so long that the others could not wait for it."""
    last = (cell.point, cell.victim) == ("save.commit", "last") and cell.fault in ("raise", "unpicklable")
    return last or any(outcome.in_doubt for outcome in outcomes)


def is_out_of_reach(cell: Cell) -> bool:
    """Whether the others cannot tell the victim that they have given up: rank 0 serves the store in which they would.
    It misses them itself when it goes on, or finds that all had come before they gave up."""
    return cell.fault == "stop" and cell.victim == "first"


def check_outcomes(cell: Cell, stories: Sequence[Story | None], struck: float) -> float:
    """All survivors raised the same cause, named and in time. Returns when the last of those did that had to notice, in
    seconds after the fault; where a process was killed, after its end."""
    victim = cell.victim_of(len(stories))
    outcomes = {rank: story.outcome for rank, story in enumerate(stories) if story is not None}
    if succeeds(cell):
        assert {outcome.said for outcome in outcomes.values()} == {"done"}, outcomes
    elif not (may_go_either_way(cell, []) and outcomes[0].said == "done"):
        told = {rank: outcome for rank, outcome in outcomes.items() if not (rank == victim and is_out_of_reach(cell))}
        causes = {(outcome.said, outcome.line) for outcome in told.values()}
        assert len(causes) == 1, f"different causes: {outcomes}"
        expected = "CommitUnknownError" if cell.point == "save.commit:sync-directory" else _CLASSES[cell.fault]
        assert causes.pop()[0] == expected, outcomes
        if is_out_of_reach(cell):
            assert outcomes[victim].said in (expected, "RankFailedError", "done"), outcomes
        for rank, outcome in told.items():
            _check_name(cell, victim, rank, outcome)
    others = [outcome.ended - struck for rank, outcome in outcomes.items() if rank != victim or cell.fault != "stop"]
    if cell.fault == "rank-0-only":
        others = [outcomes[0].ended - struck]
    limit = deadline_of(cell) + GRACE_S
    if cell.kills:
        buried = max(story.buried for story in stories if story is not None and story.buried is not None)
        others = [max(outcome.ended - buried, 0.0) for outcome in outcomes.values()]
        limit = DEATH_NOTICED_S
    assert max(others) <= limit, f"{max(others):.2f} s after the fault, at most {limit:g} were promised: {outcomes}"
    return max(others)


def seconds_to_end(stories: Sequence[Story | None], struck: float) -> float:
    """From the fault to the end of the process that was killed."""
    return max(
        (story.buried - struck for story in stories if story is not None and story.buried is not None), default=0
    )


def check_stored(cell: Cell, stories: Sequence[Story | None], root: Path) -> int:
    """What lies below ``root`` after the fault is whole, and is what the ranks were told. Returns how many checkpoints
    were loaded."""
    outcomes = [story.outcome for story in stories if story is not None]
    before = None if cell.where == "new" else PREVIOUS
    if cell.operation == "load":
        allowed = {PREVIOUS}
    elif (
        is_harmless(cell)
        or any(outcome.said == "done" for outcome in outcomes)
        or cell.point == "save.commit:sync-directory"
    ):
        allowed = {NEW}
    elif may_go_either_way(cell, outcomes):
        allowed = {NEW, before}
    else:
        allowed = {before}
    found = stored_value(root / f"step-{step_of(cell)}")
    assert found in allowed, f"found save {found}, expected {allowed}: {outcomes}"
    if not (cell.kills or cell.fault == "stop" or cell.step == "save.clean" or may_go_either_way(cell, outcomes)):
        _check_nothing_else(root / f"step-{step_of(cell)}", cell)
    if cell.where == "new":
        assert stored_value(root / f"step-{PREVIOUS_STEP}") == PREVIOUS
    newest = bcp.latest(root)
    assert newest is not None
    expected = NEW_STEP if cell.where == "new" and found is not None else PREVIOUS_STEP
    assert newest.step == expected, f"latest is {newest.url}"
    return 2 + (cell.where == "new")


def _check_nothing_else(path: Path, cell: Cell) -> None:
    """Every rank that lives removes what no manifest will ever name."""
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    named = {MANIFEST_KEY, *read_manifest(LocalBackend(path)).files.name} if MANIFEST_KEY in there else set()
    if cell.point == "save.commit:sync-directory" and cell.where == "overwrite":
        # Nobody may remove anything while it is not known whether the commit will last.
        there = {name for name in there if name in named}
    assert there == named


def check_next(cell: Cell, stories: Sequence[Story | None]) -> None:
    """The same processes went on, and hold nothing that they did not hold before."""
    for rank, story in enumerate(stories):
        if story is not None:
            assert story.left == [], f"rank {rank} is left with {story.left}"
            assert story.after == (None if cell.kills else NEXT)


def check_found(cell: Cell, found: Sequence[tuple[float, float]], stored: float | None) -> None:
    """New processes found on their disk what was there, and went on. A manager looks for the newest."""
    is_looked_for = cell.mode == "manager" or cell.where != "new"
    expected = stored if is_looked_for and stored is not None else PREVIOUS
    for before, after in found:
        assert before == expected
        assert after == NEXT


def _check_name(cell: Cell, victim: int, rank: int, outcome: Outcome) -> None:
    """The cause names rank, host and phase; on the rank itself, an error of this library need not."""
    here = socket.gethostname()
    if outcome.said == "DeadlineError":
        missing = 1 if cell.fault == "rank-0-only" else victim
        waited_for = rf" on {here} waited .* for rank\(s\) {missing}\b"
        assert re.search(rf"{waited_for}|rank {missing} on {here} has given no answer", outcome.line), outcome
    elif outcome.said == "DisagreementError":
        assert "do not agree" in outcome.line, outcome
    elif outcome.said == "RankFailedError" or rank != victim:
        assert (outcome.rank, outcome.host) == (victim, here), outcome
        # A manager tells, of an error of this library, where it was raised to the ranks.
        phases = [cell.step.partition(".")[2], *(["earlier saves"] if cell.mode == "manager" else [])]
        assert outcome.phase if cell.kills else outcome.phase in phases, outcome
    elif cell.mode != "manager":
        assert outcome.rank in (-1, victim), f"names another rank: {outcome}"
