"""Check the guarantees of the failure matrix for one cell."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from crash_cells import Cell
from crash_rank import NEW_STEP, PREVIOUS_STEP, Outcome, RankReport, deadline_of, step_of
from crash_state import NEW, NEXT, PREVIOUS, stored_value

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.manifest_file import read_manifest
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit

GRACE_S = time_limit(2)
"""Every rank raises within this time after the deadline."""

DEATH_NOTICED_S = time_limit(5)
"""Every survivor raises within this time after the end of a killed process, long before the deadline."""

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
    """Whether the checkpoint is committed despite the fault."""
    if cell.point in ("save.clean", "save.clean:delete", "save.commit.after"):
        return True
    return (cell.fault, cell.point, cell.victim) in (("kill", "save.commit", "last"), ("stop", "save.commit", "last"))


def succeeds(cell: Cell) -> bool:
    """Whether every survivor's call succeeds. A manager fails if a rank died, because all ranks agree on the result."""
    return is_harmless(cell) and not (cell.mode == "manager" and (cell.kills or cell.fault == "stop"))


def may_go_either_way(cell: Cell, outcomes: Sequence[Outcome]) -> bool:
    """Whether the commit races with the report of the fault.

    This is so if the failing rank only waits for the result of the commit, or if rank 0 was silent for so long that the
    others gave up.
    """
    last = (cell.point, cell.victim) == ("save.commit", "last") and cell.fault in ("raise", "unpicklable")
    return last or any(outcome.in_doubt for outcome in outcomes)


def is_out_of_reach(cell: Cell) -> bool:
    """Whether the others raise without an answer from the victim, which is rank 0.

    When rank 0 resumes, it raises what they reported or misses the deadline itself, or it finds that all messages had
    arrived before they gave up.
    """
    return cell.fault == "stop" and cell.victim == "first"


def check_outcomes(cell: Cell, reports: Sequence[RankReport | None], fault_at: float) -> float:
    """Check that all survivors raised the same cause in time, and return the seconds until the last one did.

    The seconds count from the fault, or from the end of a killed process.
    """
    victim = cell.victim_of(len(reports))
    outcomes = {rank: report.outcome for rank, report in enumerate(reports) if report is not None}
    if succeeds(cell):
        assert {outcome.result for outcome in outcomes.values()} == {"done"}, outcomes
    elif not (may_go_either_way(cell, []) and outcomes[0].result == "done"):
        informed = {
            rank: outcome for rank, outcome in outcomes.items() if not (rank == victim and is_out_of_reach(cell))
        }
        causes = {(outcome.result, outcome.line) for outcome in informed.values()}
        assert len(causes) == 1, f"different causes: {outcomes}"
        expected = "CommitUnknownError" if cell.point == "save.commit:sync-directory" else _CLASSES[cell.fault]
        assert causes.pop()[0] == expected, outcomes
        if is_out_of_reach(cell):
            assert outcomes[victim].result in (expected, "CommitUnknownError", "RankFailedError", "done"), outcomes
        for rank, outcome in informed.items():
            _check_name(cell, victim, rank, outcome)
    others = [outcome.ended - fault_at for rank, outcome in outcomes.items() if rank != victim or cell.fault != "stop"]
    if cell.fault == "rank-0-only":
        others = [outcomes[0].ended - fault_at]
    limit = deadline_of(cell) + GRACE_S
    if cell.kills:
        victim_ended = max(
            report.victim_ended for report in reports if report is not None and report.victim_ended is not None
        )
        others = [max(outcome.ended - victim_ended, 0.0) for outcome in outcomes.values()]
        limit = DEATH_NOTICED_S
    assert max(others) <= limit, f"{max(others):.2f} s after the fault, but the limit is {limit:g} s: {outcomes}"
    return max(others)


def seconds_to_end(reports: Sequence[RankReport | None], fault_at: float) -> float:
    """Return the time from the fault to the end of the killed process."""
    return max(
        (
            report.victim_ended - fault_at
            for report in reports
            if report is not None and report.victim_ended is not None
        ),
        default=0,
    )


def check_stored(cell: Cell, reports: Sequence[RankReport | None], root: Path) -> int:
    """Check that ``root`` contains the checkpoints that the ranks reported, and return how many were loaded."""
    outcomes = [report.outcome for report in reports if report is not None]
    before = None if cell.where == "new" else PREVIOUS
    if cell.operation == "load":
        allowed: set[float | None] = {PREVIOUS}
    elif (
        is_harmless(cell)
        or any(outcome.result == "done" for outcome in outcomes)
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
    """Check that the surviving ranks removed all files that no manifest references."""
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    named = {MANIFEST_KEY, *read_manifest(LocalBackend(path)).files.name} if MANIFEST_KEY in there else set()
    if cell.point == "save.commit:sync-directory" and cell.where == "overwrite":
        # While the outcome of the commit is unknown, no rank may remove anything.
        there = {name for name in there if name in named}
    assert there == named


def check_next(cell: Cell, reports: Sequence[RankReport | None]) -> None:
    """Check that the same processes made the next save, and leaked nothing."""
    for rank, report in enumerate(reports):
        if report is not None:
            assert report.leaked == [], f"rank {rank} leaked {report.leaked}"
            assert report.after == (None if cell.kills else NEXT)


def check_found(cell: Cell, found: Sequence[tuple[float, float]], stored: float | None) -> None:
    """Check what new processes found and saved. A manager searches for the newest checkpoint."""
    finds_new = cell.mode == "manager" or cell.where != "new"
    expected = stored if finds_new and stored is not None else PREVIOUS
    for before, after in found:
        assert before == expected
        assert after == NEXT


def _check_name(cell: Cell, victim: int, rank: int, outcome: Outcome) -> None:
    """Check that the cause names rank, host and phase. On the failing rank, an error of this library need not."""
    here = socket.gethostname()
    if outcome.result == "DeadlineError":
        missing = 1 if cell.fault == "rank-0-only" else victim
        waited_for = rf" on {here} waited .* for rank\(s\) {missing}\b"
        assert re.search(rf"{waited_for}|rank {missing} on {here} has given no answer", outcome.line), outcome
    elif outcome.result == "DisagreementError":
        assert "do not agree" in outcome.line, outcome
    elif outcome.result == "RankFailedError" or rank != victim:
        assert (outcome.rank, outcome.host) == (victim, here), outcome
        # For an error of this library, a manager reports the phase in which it was distributed to the ranks.
        phases = [cell.step.partition(".")[2], *(["earlier saves"] if cell.mode == "manager" else [])]
        assert outcome.phase if cell.kills else outcome.phase in phases, outcome
    elif cell.mode != "manager":
        assert outcome.rank in (-1, victim), f"names another rank: {outcome}"
