"""Check the library's guarantees for every failure, at every step, on the first and the last rank, in every mode.

A normal run tests a sample (see ``tests/support/sampling.py``), ``BCP_TEST_FULL=1`` every cell, and
``CRASH_MATRIX_REPORT=<file>`` writes the figures of ``docs/reliability.md``. To repeat one cell:

    BCP_TEST_FULL=1 pytest tests/crash/test_failure_matrix.py -k kill-save.write.file-last-async-new

All cells take about seven minutes on two cores:

    BCP_TEST_FULL=1 CRASH_MATRIX_REPORT=figures.json pytest tests/crash/test_failure_matrix.py -n 2 --dist load
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sampling
from crash_cells import Cell, all_cells, labels_of, sample
from crash_faults import time_of
from crash_holdings import processes_of_sessions
from crash_rank import run_cell, run_next_job, step_of
from crash_report import CellFigures, Report
from crash_state import stored_value
from crash_verdict import check_found, check_next, check_outcomes, check_stored, seconds_to_end
from leak_watch import shared_memory_of

from bytecheckpoint.testing.ranks import RankPool

WORLD = 2
SAMPLE = 60
TIMEOUT_S = 120.0


CELLS = all_cells() if sampling.is_full() else sample(all_cells(), sampling.seed(), SAMPLE)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    figures = Report(os.environ.get("CRASH_MATRIX_REPORT"))
    yield figures
    figures.write()


def test_every_sample_covers_every_label() -> None:
    cells = all_cells()
    assert len({str(cell) for cell in cells}) == len(cells)
    labels = {label for cell in cells for label in labels_of(cell)}
    for seed in range(5):
        chosen = sample(cells, seed, SAMPLE)
        assert len(chosen) == SAMPLE
        assert {label for cell in chosen for label in labels_of(cell)} == labels
        assert chosen == sample(cells, seed, SAMPLE)
    assert sample(cells, 0, SAMPLE) != sample(cells, 1, SAMPLE)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(pool: RankPool, report: Report, tmp_path: Path, cell: Cell) -> None:
    figures = CellFigures(cell)
    with report.of(figures):
        _run(pool, tmp_path, cell, figures)


def _run(pool: RankPool, tmp_path: Path, cell: Cell, figures: CellFigures) -> None:
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    scratch.mkdir()
    deaths = {cell.victim_of(WORLD): int(signal.SIGKILL)} if cell.kills else {}
    earlier = set(pool.pids)
    reports = pool.run(run_cell, cell, str(root), str(scratch), timeout_s=TIMEOUT_S, expect_death=deaths)
    fault_at = time_of(scratch / "fault-time")
    assert fault_at is not None, "the fault did not happen"
    figures.ended_s = seconds_to_end(reports, fault_at)
    figures.noticed_s = check_outcomes(cell, reports, fault_at)
    figures.loads += check_stored(cell, reports, root if cell.kills else scratch / "after")
    check_next(cell, reports)
    figures.loads += sum(report is not None and report.after is not None for report in reports)
    if cell.kills:
        stored = stored_value(root / f"step-{step_of(cell)}")
        found = pool.run(run_next_job, cell, str(root), timeout_s=TIMEOUT_S)
        check_found(cell, found, stored)
        figures.loads += 2 * len(found)
    alive = set(pool.pids)
    ranks = earlier.union(alive, *(report.pids for report in reports if report is not None))
    assert processes_of_sessions(ranks - alive) == [], "a child of a dead rank is still running"
    assert not shared_memory_of(ranks)
