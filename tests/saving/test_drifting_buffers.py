"""Buffers that differ between data-parallel ranks: what is stored is one rank's, whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


def _save(rank: int, world_size: int, path: str, wrap: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4))
    if rank == 0 and wrap == "stages":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 4))  # the first to have the statistics is rank 1
    wrapped = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": fully_shard, "stages": nn.Identity}[wrap](model)
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.full_like(buffer, rank + len(name)))
    bcp.save(
        path, {"model": model if wrap == "stages" else wrapped}, options=bcp.SaveOptions(deadline_s=time_limit(30))
    )


@pytest.mark.parametrize(("wrap", "first"), [("ddp", 0), ("fsdp2", 0), ("stages", 1)])
def test_all_running_statistics_are_the_first_ranks(pool: RankPool, tmp_path: Path, wrap: str, first: int) -> None:
    pool.run(_save, str(tmp_path), wrap)
    checkpoint = bcp.open(tmp_path)
    names = [name for name, _ in nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4)).named_buffers()]
    found = {
        name: {x - len(name) for x in checkpoint[f"model.{name}"][...].double().flatten().tolist()} for name in names
    }
    assert found == {name: {first} for name in names}
