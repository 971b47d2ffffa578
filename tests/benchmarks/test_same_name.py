"""One turn of the comparison with the package of the same name, with this package: the job measures and compares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.same_name import _run, table


@pytest.mark.full
def test_the_job_measures_itself(tmp_path: Path) -> None:
    sample = _run(Path(sys.executable), tmp_path, layers=2)
    assert 0 < sample["stall_s"] <= sample["written_s"]
    assert sample["load_s"] > 0
    ((name, *figures),) = table({"bytecheckpoint": [sample]}).rows
    assert name == "bytecheckpoint"
    assert len(figures) == 3
