"""Save one GPT in any framework and sharding, and load it into any other: the matrix of all pairs.

Master weights (or float32 parameters), moments, steps and options must be bit for bit those that were saved, the
parameters that compute must be their rounding, and training must continue with the same losses: exactly in the same
layout, and within the precision of bfloat16 in others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampling import sample

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("deepspeed", reason="make test-pairs runs this with both frameworks")
pytest.importorskip("megatron.core", reason="make test-pairs runs this with both frameworks")

from engines import differences
from gpt_jobs import KINDS, gpt_job

BEFORE, AFTER = range(2), range(2, 5)

NAMES = list(KINDS)
# In a sample, every kind saves once and loads once.
SHIFTS = sample(range(len(NAMES)), 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(max(KINDS.values())) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


def _save(rank: int, world_size: int, kind: str, path: str) -> None:
    with gpt_job(kind, seed=1) as job:
        job.train(BEFORE)
        bcp.save(path, job.state)
        form = job.full_form()
        losses = job.train(AFTER)
        if rank == 0:
            torch.save((form, losses), f"{path}.expected")


def _load(rank: int, world_size: int, kind: str, paths: dict[str, str]) -> dict[str, str]:
    """Load every checkpoint into a job of this kind, and return the faults by kind of the saving job."""
    faults = {}
    for saved, path in paths.items():
        form, losses = torch.load(f"{path}.expected")
        with gpt_job(kind, seed=2) as job:
            report = bcp.load(path, job.state)
            bad = differences(job.full_form(), form)
            found = job.train(AFTER)
        apart = max(abs(a - b) for a, b in zip(found, losses))
        if bad or report.missing or report.unexpected or apart > (0 if saved == kind else 1e-3):
            faults[saved] = f"{bad[:5]} {report} losses {found} instead of {losses}"
    return faults


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.sampled(12)
def test_every_kind_of_job_loads_every_other(target: str, pool: RankPool, folder: Path) -> None:
    sources = [NAMES[NAMES.index(target) - shift] for shift in SHIFTS]
    paths = {saved: str(folder / saved) for saved in sources}
    for saved, path in paths.items():
        if not Path(path).exists():
            pool.run(_save, saved, path, world_size=KINDS[saved])
    faults = pool.run(_load, target, paths, world_size=KINDS[target], timeout_s=280)
    assert faults == [{}] * KINDS[target]
