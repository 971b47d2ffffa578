"""Scatter reads: of matrices sharded by columns, every rank reads some rows and sends other ranks their parts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sorted_arguments import loading
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.engine.reading import read_plan
from bytecheckpoint.errors import BytecheckpointError, CorruptionError, RankFailedError
from bytecheckpoint.loading import run
from bytecheckpoint.loading.shared_reads.scatter import ScatterExchange
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(5, of=__name__)

TENSORS = ("down", "experts", "half", "flags")


def content() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, some with an odd number of rows; 5 MB."""
    torch.manual_seed(3)
    return {
        "down": torch.randn(1003, 1020),
        "experts": torch.randn(6, 64, 96),
        "half": torch.randn(77, 36).to(torch.bfloat16),
        "flags": torch.rand(501, 12) > 0.5,
        "up": torch.randn(512, 40),
        "norm": torch.randn(1024),
    }


def nbytes(names: tuple[str, ...]) -> int:
    tensors = content()
    return sum(tensors[name].nbytes for name in names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scattered") / "checkpoint"
    bcp.save(path, {"model": content()}, options=bcp.SaveOptions(chunk_size=16 << 10))
    return path


def empty(world_size: int) -> dict[str, torch.Tensor]:
    """Targets sharded by their last dimension, ``up`` by rows, and ``norm`` replicated."""
    mesh = init_device_mesh("cpu", (world_size,))
    last = {"down": Shard(1), "experts": Shard(2), "half": Shard(1), "flags": Shard(1), "up": Shard(0)}
    return {
        name: distribute_tensor(torch.full_like(tensor, 1), mesh, [last.get(name, Replicate())])
        for name, tensor in content().items()
    }


def equal(tensors: dict[str, torch.Tensor]) -> bool:
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return all(torch.equal(tensor, whole[name].to(tensor.dtype)) for name, tensor in content().items())


def _load(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    tensors = empty(world_size)
    report = bcp.load(path, {"model": tensors}, **loading(deadline_s=time_limit(60), **options))
    assert equal(tensors)
    return report.bytes_read, report.bytes_received


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("verify", [True, False])
def test_every_byte_is_read_once_and_sent_once(rank_pool: RankPool, saved: Path, world_size: int, verify: bool) -> None:
    results = rank_pool.run(_load, str(saved), {"share_reads": "always", "verify": verify}, world_size=world_size)
    read, received = (sum(column) for column in zip(*results))
    total = nbytes((*TENSORS, "up", "norm"))
    # Rows are split at chunk boundaries where possible; the thirds of `up` share a chunk at each cut.
    assert read <= 1.02 * total + (2 * world_size * len(content()) << 14)
    scattered = nbytes(TENSORS) * (world_size - 1) // world_size
    aligned = received - nbytes(("norm",)) * (world_size - 1)
    assert scattered <= aligned <= 1.01 * scattered


def test_without_sharing_each_rank_reads_complete_frames(rank_pool: RankPool, saved: Path) -> None:
    """This is the cost that scattering avoids."""
    results = rank_pool.run(_load, str(saved), {"share_reads": "never"}, world_size=4)
    assert sum(read for read, _ in results) >= 4 * nbytes(("down",))


def _over_reads(rank: int, world_size: int, path: str, share_reads: str) -> Any:
    with mock.patch.object(read_plan, "_MIN_OVER_READ", 1 << 20), mock.patch.object(run._log, "warning") as warning:
        report = bcp.load(
            path,
            {"model": empty(world_size)},
            options=bcp.LoadOptions(share_reads=share_reads, deadline_s=time_limit(60)),
        )
    return report.over_reads, [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_a_load_that_reads_far_more_than_it_needs_says_so(rank_pool: RankPool, saved: Path) -> None:
    results = rank_pool.run(_over_reads, str(saved), "never", world_size=4)
    for over_reads, _ in results:
        assert {f"model.{name}" for name in TENSORS} == over_reads.keys()
        assert over_reads["model.down"] == (nbytes(("down",)), nbytes(("down",)) // 4)
    [warning], *others = [warnings for _, warnings in results]
    assert "of model.down, model.experts, model.flags and 1 more than it needs" in warning
    assert "share_reads='always'" in warning
    assert others == [[], [], []]
    assert rank_pool.run(_over_reads, str(saved), "always", world_size=4) == [({}, [])] * 4


def _load_in_two_dimensions(rank: int, world_size: int, path: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {
        name: distribute_tensor(torch.full_like(tensor, 1), mesh, [Shard(0), Shard(1)])
        for name, tensor in content().items()
        if name in ("down", "experts")
    }
    report = bcp.load(
        path, {"model": tensors}, strict=False, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60))
    )
    expected = content()
    assert all(torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in tensors.items())
    return report.bytes_read, report.bytes_received


def test_frames_that_are_parts_of_a_tensor(rank_pool: RankPool, saved: Path) -> None:
    """Shard by rows among pairs of ranks, and by columns within a pair."""
    results = rank_pool.run(_load_in_two_dimensions, str(saved), world_size=4)
    assert all(received for _, received in results)
    assert sum(read for read, _ in results) <= 1.1 * nbytes(("down", "experts"))


def _load_into_odd_memory(rank: int, world_size: int, path: str) -> Any:
    """Load into another dtype and another memory order."""
    mesh = init_device_mesh("cpu", (world_size,))
    columns = 1020 // world_size
    local = torch.zeros(columns, 1003, dtype=torch.float64).t()
    down = DTensor.from_local(local, mesh, [Shard(1)], shape=torch.Size((1003, 1020)), stride=(1020, 1))
    report = bcp.load(
        path,
        {"model": {"down": down}},
        strict=False,
        options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)),
    )
    assert torch.equal(local, content()["down"][:, rank * columns : (rank + 1) * columns].double())
    return report.bytes_received


def test_memory_of_any_kind_is_filled(rank_pool: RankPool, saved: Path) -> None:
    received = rank_pool.run(_load_into_odd_memory, str(saved), world_size=4)
    sent = 2 * nbytes(("down",)) * 3 // 4
    assert sent <= sum(received) <= 1.01 * sent


def _load_damaged(rank: int, world_size: int, path: str, damaged: int | None) -> Any:
    tensors = empty(world_size)
    real = ScatterExchange._send
    if rank == damaged:
        ScatterExchange._send = lambda *args: real(*args, checksum=1)  # type: ignore[method-assign]
    try:
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        ScatterExchange._send = real  # type: ignore[method-assign]
    return None


def test_damage_in_transit_is_the_same_error_on_all_ranks(rank_pool: RankPool, saved: Path) -> None:
    results = rank_pool.run(_load_damaged, str(saved), 1, world_size=3)
    assert len(set(results)) == 1
    assert results[0][0] == CorruptionError.__name__
    assert "arrived damaged from rank" in results[0][1]


def test_a_damaged_file_is_the_same_error_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": content()}, options=bcp.SaveOptions(chunk_size=16 << 10))
    file = next(tmp_path.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    results = rank_pool.run(_load_damaged, str(tmp_path), None, world_size=4)
    assert len(set(results)) == 1
    assert results[0][0] == CorruptionError.__name__
    assert "checksum mismatch in tensor model." in results[0][1]


def _die(rank: int, world_size: int, path: str, dying: int) -> Any:
    tensors = empty(world_size)
    if rank == dying:
        telemetry.record(lambda span: os.kill(os.getpid(), signal.SIGKILL) if span.name == "exchange" else None)
    try:
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("dying", [0, 2])
def test_all_ranks_name_a_rank_that_was_killed(rank_pool: RankPool, saved: Path, dying: int) -> None:
    results = rank_pool.run(_die, str(saved), dying, world_size=4, expect_death={dying: signal.SIGKILL})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    assert {name for name, _ in survivors} == {RankFailedError.__name__}
    assert all(f"rank {dying} on " in text and "ended" in text for _, text in survivors)
