"""Whole checkpoints on stores that are no file system: a real S3 server, and memory."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointNotFoundError, RootInUseError, StorageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


def _model(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _save_sharded(rank: int, world_size: int, path: str, options: dict[str, Any], value: float) -> None:
    state = {"model": fully_shard(_model(value)), "extra_state": {"value": value}}
    bcp.save(path, state, step=int(value), async_save=True, storage_options=options).result(time_limit(60))


def _load_whole(path: str, options: dict[str, Any]) -> float:
    model, extra = _model(0.0), {"value": 0.0}
    bcp.load(path, {"model": model, "extra_state": extra}, storage_options=options)
    (value,) = {*torch.cat([p.flatten() for p in model.parameters()]).tolist(), extra["value"]}
    return float(value)


@pytest.mark.s3
def test_ranks_save_to_s3_and_one_process_loads(rank_pool: RankPool, bucket: str, s3: dict[str, Any]) -> None:
    root = f"s3://{bucket}/runs"
    for step in (1.0, 2.0):
        rank_pool.run(_save_sharded, f"{root}/step-{step:.0f}", s3, step, world_size=2)
    newest = bcp.latest(root, storage_options=s3)
    assert newest is not None
    assert newest.step == 2
    assert newest.verify().ok
    assert _load_whole(newest.url, s3) == 2.0
    assert newest["model.0.weight"][2:4, 1].tolist() == [2.0, 2.0]

    # Overwriting replaces the whole; nothing of the old stays in the bucket.
    rank_pool.run(_save_sharded, f"{root}/step-1", s3, 5.0, world_size=2)
    again = bcp.open(f"{root}/step-1", storage_options=s3)
    assert _load_whole(again.url, s3) == 5.0
    stored = {stat.key for stat in again.backend.list()}
    assert stored == {"manifest.msgpack", *again.manifest.files.name}


@pytest.mark.s3
def test_a_manager_on_s3(bucket: str, s3: dict[str, Any]) -> None:
    root = f"s3://{bucket}/managed"
    state = {"model": _model(0.0), "extra_state": {"value": 0.0}}
    with bcp.CheckpointManager(root, cadence=1, keep=2, storage_options=s3, job=bcp.JobOptions(lease_s=9.0)) as manager:
        assert manager.resume(state) is None
        for step in range(1, 5):
            manager.save(step, {"model": _model(float(step)), "extra_state": {"value": float(step)}})
        with pytest.raises(RootInUseError):
            bcp.CheckpointManager(root, storage_options=s3).wait()
    with bcp.CheckpointManager(root, storage_options=s3) as manager:
        damaged = bcp.open(f"{root}/step-4", storage_options=s3)
        damaged.backend.delete(damaged.manifest.files.name[:1])
        report = manager.resume(state)
    assert report is not None
    assert report.step == 3
    assert state["extra_state"]["value"] == 3.0
    kept = open_backend(root, **s3).list_children("")
    assert [name for name in kept if name.startswith("step-")] == ["step-3/", "step-4/"]


@pytest.mark.s3
@pytest.mark.parametrize("is_async", [False, True])
def test_encoded_tensors_on_s3(bucket: str, s3: dict[str, Any], is_async: bool) -> None:
    """In several parts, of which the last is shorter than the size before encoding says."""
    path, generator = f"s3://{bucket}/encoded-{is_async}", torch.Generator().manual_seed(0)
    state = {"w": torch.randn(11_000_003, generator=generator), "n": torch.arange(100_000)}
    bcp.save(
        path, {"s": state}, async_save=is_async, storage_options=s3, options=bcp.SaveOptions(codec="zstd-planes")
    ).result(time_limit(60))
    checkpoint = bcp.open(path, storage_options=s3)
    assert checkpoint.manifest.file_bytes < 0.87 * checkpoint.manifest.nbytes
    assert {stat.key for stat in checkpoint.backend.list()} == {"manifest.msgpack", *checkpoint.manifest.files.name}
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint["s.w"][7_000_000:7_000_100], state["w"][7_000_000:7_000_100])
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    bcp.load(path, {"s": found}, storage_options=s3)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.s3
def test_nothing_there_on_s3(bucket: str, s3: dict[str, Any]) -> None:
    with pytest.raises(CheckpointNotFoundError, match=bucket):
        bcp.open(f"s3://{bucket}/nowhere", storage_options=s3)
    with pytest.raises(StorageError, match="bucket"):
        bcp.save(f"s3://none-{uuid.uuid4().hex}/x", {"model": _model(1.0)}, storage_options=s3)


def test_memory_store(rank_pool: RankPool) -> None:
    path = f"memory://{uuid.uuid4().hex}/checkpoint"
    bcp.save(path, {"model": _model(3.0), "extra_state": {"value": 3.0}})
    assert _load_whole(path, {}) == 3.0
    assert bcp.open(path).verify().ok
