"""Every failure at every step, on the first and the last rank, in every kind of call: what is promised holds.

A sample runs with all other tests, ``CRASH_MATRIX=<number>`` runs another one, ``CRASH_MATRIX=all`` every cell, and
``CRASH_MATRIX_REPORT=<file>`` writes the figures of ``docs/reliability.md``. One cell is repeated by its name:

    CRASH_MATRIX=all pytest tests/crash/test_failure_matrix.py -k kill-save.write.file-last-async-new

All of them, on two cores, in some seven minutes:

    CRASH_MATRIX=all CRASH_MATRIX_REPORT=figures.json pytest tests/crash/test_failure_matrix.py -n 2 --dist load
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_cells import Cell, all_cells, labels_of, sample
from crash_faults import time_of
from crash_holdings import processes_of_sessions, shared_memory_of
from crash_rank import live_on, live_through, step_of
from crash_report import CellFigures, Report
from crash_state import stored_value
from crash_verdict import check_found, check_next, check_outcomes, check_stored, seconds_to_end

from bytecheckpoint.testing.ranks import RankPool

WORLD = 2
SAMPLE = 100
TIMEOUT_S = 90.0


def _chosen() -> tuple[list[Cell], str]:
    """The cells of this run, and how to choose them again."""
    asked = os.environ.get("CRASH_MATRIX", "")
    if asked == "all":
        return all_cells(), "all"
    # All workers of a run must choose the same: the day changes rarely.
    seed = int(asked) if asked else int(time.time() // 86400)
    return sample(all_cells(), seed, SAMPLE), str(seed)


CELLS, SEED = _chosen()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    figures = Report(os.environ.get("CRASH_MATRIX_REPORT"))
    yield figures
    figures.write()


def test_every_sample_has_something_of_everything() -> None:
    cells = all_cells()
    assert len({str(cell) for cell in cells}) == len(cells)
    everything = {label for cell in cells for label in labels_of(cell)}
    for seed in range(5):
        chosen = sample(cells, seed, SAMPLE)
        assert len(chosen) == SAMPLE
        assert {label for cell in chosen for label in labels_of(cell)} == everything
        assert chosen == sample(cells, seed, SAMPLE)
    assert sample(cells, 0, SAMPLE) != sample(cells, 1, SAMPLE)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{SEED}:{cell}")
def test_cell(pool: RankPool, report: Report, tmp_path: Path, cell: Cell) -> None:
    figures = CellFigures(cell)
    with report.of(figures):
        _live(pool, tmp_path, cell, figures)


def _live(pool: RankPool, tmp_path: Path, cell: Cell, figures: CellFigures) -> None:
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    scratch.mkdir()
    deaths = {cell.victim_of(WORLD): int(signal.SIGKILL)} if cell.kills else {}
    shared = shared_memory_of(set())
    earlier = set(pool.pids)
    stories = pool.run(live_through, cell, str(root), str(scratch), timeout_s=TIMEOUT_S, expect_death=deaths)
    struck = time_of(scratch / "struck")
    assert struck is not None, "the fault did not strike"
    figures.ended_s = seconds_to_end(stories, struck)
    figures.noticed_s = check_outcomes(cell, stories, struck)
    figures.loads += check_stored(cell, stories, root if cell.kills else scratch / "after")
    check_next(cell, stories)
    figures.loads += sum(story is not None and story.after is not None for story in stories)
    if cell.kills:
        stored = stored_value(root / f"step-{step_of(cell)}")
        found = pool.run(live_on, cell, str(root), timeout_s=TIMEOUT_S)
        check_found(cell, found, stored)
        figures.loads += 2 * len(found)
    alive = set(pool.pids)
    ranks = earlier.union(alive, *(story.pids for story in stories if story is not None))
    assert processes_of_sessions(ranks - alive) == [], "a process of a rank that is gone lives on"
    assert shared_memory_of(ranks) <= shared
