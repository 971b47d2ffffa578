"""Random damage to checkpoints of this library, with right checksums, and of other systems.

``BCP_TEST_EXAMPLES=20 BCP_TEST_FULL=1`` makes 240,000 mutants; ``BCP_TEST_SEED`` chooses others.
"""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_mutants
import pytest
import sampling
from warm_python import warm_python

from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(2, of="long searches")


def test_mutants_raise_only_errors_of_the_library_and_reach_nothing_outside(tmp_path: Path) -> None:
    """They are opened, read, loaded, verified, searched, exported, overwritten and removed.

    600 mutants take over 20 s; fewer find little.
    """
    count = sampling.examples(12_000, 600)
    command = [checkpoint_mutants.__file__, str(tmp_path), str(sampling.seed()), "0", str(count)]
    done = warm_python().run(command, timeout=time_limit(30 + count / 10))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["faults"] == []
    assert report["grown_mib"] < 200
    results = report["results"]
    assert sum(results.values()) == count
    for system in ("own", "dcp", "bytecheckpoint", "deepspeed", "huggingface", "torch", "trainer"):
        assert results[f"{system}: accepted"]
        assert results[f"{system}: FormatError"]
