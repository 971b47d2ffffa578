"""Save in one framework or ZeRO stage, and load into another, also with another number of ranks.

Parameters (or master weights), moments and steps must be bit for bit those that were saved, and training must continue
with the same losses: exactly in the same layout, and within the precision of bfloat16 in others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from deepspeed_jobs import KINDS, deepspeed_job
from engines import TORCH_KINDS, Job, differences, torch_job
from sampling import is_full, sample

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.deepspeed

BEFORE, AFTER = range(2), range(2, 5)

MAIN = (*TORCH_KINDS, "zero0", "zero1", "zero2", "zero3")
VARIANTS = tuple(kind for kind in KINDS if kind not in MAIN)

Pair = tuple[str, str]


def build(kind: str, seed: int) -> Job:
    return torch_job(kind, seed) if kind in TORCH_KINDS else deepspeed_job(kind, seed)


def _save(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        job = build(kind, seed=1)
        job.train(BEFORE)
        bcp.save(f"{folder}/{kind}", job.state)
        form = job.full_form()
        losses = job.train(AFTER)
        if rank == 0:
            torch.save((form, losses, world_size), f"{folder}/{kind}.expected")


def _load(rank: int, world_size: int, folder: str, pairs: list[Pair]) -> list[str]:
    faults = []
    for saved, target in pairs:
        form, losses, saved_on = torch.load(f"{folder}/{saved}.expected")
        job = build(target, seed=2)
        # The frozen parameter has no master weight, so a narrower one must be allowed.
        report = bcp.load(f"{folder}/{saved}", job.state, cast="any")
        bad = differences(job.full_form(), form)
        found = job.train(AFTER)
        apart = max(abs(a / b - 1) for a, b in zip(found, losses))
        is_same = saved == target and saved_on == world_size
        if bad or report.missing or apart > (0 if is_same else 1e-3):
            faults.append(f"{saved} on {saved_on} -> {target} on {world_size}: {bad[:5]} {report.missing} {apart:.1e}")
    return faults


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


ALL = [*product(MAIN, MAIN), *product(VARIANTS, VARIANTS), *product(VARIANTS, MAIN), *product(MAIN, VARIANTS)]
COUNT = 50 if is_full() else 10  # pairs of one test


@pytest.mark.parametrize("first", range(0, len(ALL), COUNT) if is_full() else [0])
@pytest.mark.parametrize(("saved_on", "loaded_on"), sample([(2, 2), (2, 4), (3, 2)], 2))
@pytest.mark.sampled(1)
def test_pairs(saved_on: int, loaded_on: int, first: int, pool: RankPool, tmp_path: Path) -> None:
    pairs = ALL[first : first + COUNT] if is_full() else [*sample(ALL[:49], 5), *sample(ALL[49:], 5)]
    pool.run(_save, str(tmp_path), sorted({saved for saved, _ in pairs}), world_size=saved_on, timeout_s=280)
    faults = pool.run(_load, str(tmp_path), pairs, world_size=loaded_on, timeout_s=280)
    assert [fault for rank in faults for fault in rank] == []
