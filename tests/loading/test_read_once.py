"""One rank reads the bytes that several ranks request, and forwards them around a ring."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from leak_watch import held_now, left_since
from sorted_arguments import loading
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, CorruptionError, RankFailedError, UsageError
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(8, of=__name__)


def content(seed: float = 0.0) -> dict[str, torch.Tensor]:
    """Large and small tensors of odd shapes and several dtypes; 6 MB."""
    torch.manual_seed(7)
    made = {
        "large": torch.randn(1001, 1024),
        "tall": torch.randn(50257, 3),
        "one_row": torch.randn(1, 300_000),
        "half": torch.randn(33, 77).to(torch.bfloat16),
        "flags": torch.rand(4097) > 0.5,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "complex": torch.randn(7, 3, dtype=torch.complex64),
    }
    made |= {f"small.{i}": torch.randn(i + 1) for i in range(200)}
    return {name: tensor + seed if tensor.is_floating_point() else tensor for name, tensor in made.items()}


def like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read_once") / "checkpoint"
    bcp.save(path, {"model": content(), "extra_state": {"step": 3}}, options=bcp.SaveOptions(chunk_size=16 << 10))
    return path


def _load_all(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    tensors = like(content())
    extra = {"step": 0}
    report = bcp.load(path, {"model": tensors, "extra_state": extra}, **loading(deadline_s=time_limit(60), **options))
    assert extra == {"step": 3}
    assert equal(tensors, content())
    work = report.timings.work.get("exchange")
    assert report.bytes_received == (work.nbytes if work else 0)
    return report.bytes_read, report.bytes_received, report.bytes_requested


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("verify", [True, False])
def test_replicas_read_each_byte_once(rank_pool: RankPool, saved: Path, world_size: int, verify: bool) -> None:
    options = {"share_reads": "always", "verify": verify}
    results = rank_pool.run(_load_all, str(saved), options, world_size=world_size)
    total = nbytes(content())
    read, received, requested = (list(column) for column in zip(*results))
    assert total <= sum(read) <= 1.02 * total + (world_size << 15), "headers and a chunk at a cut at most"
    assert max(read) <= 1.1 * total / world_size + (2 << 15)
    assert sum(received) == (world_size - 1) * total
    assert requested == [total] * world_size


def test_sharing_can_be_switched_off(rank_pool: RankPool, saved: Path) -> None:
    for read, received, requested in rank_pool.run(_load_all, str(saved), {"share_reads": "never"}, world_size=2):
        assert read >= requested == nbytes(content())
        assert received == 0


def test_ranks_of_one_host_read_cached_files_separately(rank_pool: RankPool, saved: Path) -> None:
    for file in saved.rglob("*"):
        if file.is_file():
            file.read_bytes()
    results = rank_pool.run(_load_all, str(saved), {}, world_size=2)
    assert [received for _, received, _ in results] == [0, 0]


@pytest.mark.parametrize(("world_size", "passes_on"), [(3, False), (4, True)])
def test_a_cold_disk_is_read_once_for_many(
    rank_pool: RankPool, tmp_path: Path, world_size: int, passes_on: bool
) -> None:
    bcp.save(tmp_path, {"model": content(), "extra_state": {"step": 3}}, options=bcp.SaveOptions(chunk_size=16 << 10))
    backend = LocalBackend(tmp_path)
    (key,) = (stat.key for stat in backend.list() if stat.key.endswith(".safetensors"))
    with open(tmp_path / key, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with backend.open_object(key) as stored:
        if stored.is_cached(4 << 20, 1 << 20) or not stored.direct_alignment():
            pytest.skip("this file system has no cache that can be dropped, or no way past it")
    results = rank_pool.run(_load_all, str(tmp_path), {}, world_size=world_size)
    assert [received > 0 for _, received, _ in results] == [passes_on] * world_size


@pytest.mark.s3
def test_an_object_store_is_read_once_by_default(rank_pool: RankPool, bucket: str, s3: dict[str, Any]) -> None:
    url = f"s3://{bucket}/checkpoint"
    bcp.save(url, {"model": content(), "extra_state": {"step": 3}}, storage_options=s3)
    results = rank_pool.run(_load_all, url, {"storage_options": s3}, world_size=2)
    assert sum(received for _, received, _ in results) == nbytes(content())


def test_an_unknown_choice_is_refused(saved: Path) -> None:
    with pytest.raises(UsageError, match="auto, always, never"):
        bcp.load(saved, {"model": like(content())}, options=bcp.LoadOptions(share_reads="sometimes"))


def test_one_process_shares_no_reads(saved: Path) -> None:
    tensors = like(content())
    report = bcp.load(saved, {"model": tensors}, options=bcp.LoadOptions(share_reads="always"))
    assert equal(tensors, content())
    assert report.bytes_received == 0


def _load_into_odd_memory(rank: int, world_size: int, path: str) -> Any:
    """Load into other dtypes, memory in another order, and elements that share memory."""
    requested = content()
    tensors: dict[str, torch.Tensor] = {
        "large": torch.zeros(1024, 1001).t(),
        "tall": torch.zeros(50257, 3, dtype=torch.float64),
        "one_row": torch.zeros(1, 600_000)[:, ::2],
        "scalar": torch.zeros(()).expand(()),
    }
    report = bcp.load(
        path, {"model": tensors}, strict=False, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60))
    )
    assert all(torch.equal(tensors[name].to(requested[name].dtype), requested[name]) for name in tensors)
    return report.bytes_received > 0, sorted(report.cast)


def test_memory_of_any_kind_is_filled(rank_pool: RankPool, saved: Path) -> None:
    assert rank_pool.run(_load_into_odd_memory, str(saved), world_size=3) == [(True, ["model.tall"])] * 3


def _load_some(rank: int, world_size: int, path: str) -> Any:
    """Ranks 0 and 1 request the same; rank 2 requests another dtype, and rank 3 only some of the tensors."""
    tensors = like(content())
    if rank == 2:
        tensors["large"] = tensors["large"].double()
    if rank == 3:
        tensors = {name: tensors[name] for name in ("large", "half")}
    report = bcp.load(
        path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60))
    )
    expected = content()
    assert all(torch.equal(tensor.to(expected[name].dtype), expected[name]) for name, tensor in tensors.items())
    return report.bytes_received > 0


def test_ranks_read_unshared_requests_themselves(rank_pool: RankPool, saved: Path) -> None:
    assert rank_pool.run(_load_some, str(saved), world_size=4) == [True, True, False, False]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 2048)
        self.norm = nn.LayerNorm(2048)
        self.down = nn.Linear(2048, 512)


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def _load_hsdp(rank: int, world_size: int, path: str) -> Any:
    model = net(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards")))
    report = bcp.load(path, {"model": model}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    expected = net(0).state_dict()
    for name, parameter in model.state_dict().items():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    return report.bytes_read, report.bytes_received, report.bytes_requested


def test_replicas_of_shards_are_read_once(rank_pool: RankPool, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": net(0)}, options=bcp.SaveOptions(chunk_size=4096))
    results = rank_pool.run(_load_hsdp, str(tmp_path), world_size=4)
    read, received, requested = (sum(column) for column in zip(*results))
    assert requested == 2 * nbytes(net(0).state_dict())
    assert received == requested // 2
    assert read <= 1.1 * requested / 2


def _tensor_parallel(rank: int, world_size: int, seed: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = net(seed).state_dict()
    placements = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    return {
        name: distribute_tensor(tensor, mesh, [placements.get(name, Replicate())]) for name, tensor in whole.items()
    }


def _load_tensor_parallel(rank: int, world_size: int, path: str) -> Any:
    model = _tensor_parallel(rank, world_size, 1)
    report = bcp.load(path, {"model": model}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    expected = net(0).state_dict()
    assert all(torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in model.items())
    return report.bytes_received, report.bytes_read


def test_replicas_of_tensor_parallel_ranks_are_read_once(rank_pool: RankPool, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": net(0)}, options=bcp.SaveOptions(chunk_size=4096))
    received, read = zip(*rank_pool.run(_load_tensor_parallel, str(tmp_path), world_size=4))
    tensors = net(0).state_dict()
    replicated = {name: t for name, t in tensors.items() if name.startswith("norm") or name == "down.bias"}
    # Of the matrix that is sharded by columns, each rank reads some rows and sends every other rank its part.
    assert sum(received) == 3 * nbytes(replicated) + tensors["down.weight"].nbytes * 3 // 4
    assert sum(read) <= 1.05 * nbytes(tensors)


def _load_damaged(rank: int, world_size: int, path: str) -> Any:
    tensors = like(content())
    try:
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    except BytecheckpointError as error:
        cause = type(error.__cause__).__name__
        again = like(content())
        return type(error).__name__, str(error), cause, again is not tensors
    return None


def test_a_damaged_byte_is_the_same_error_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": content()}, options=bcp.SaveOptions(chunk_size=16 << 10))
    file = next(tmp_path.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    results = rank_pool.run(_load_damaged, str(tmp_path), world_size=4)
    assert {name for name, *_ in results} == {CorruptionError.__name__}
    assert len({text for _, text, *_ in results}) == 1
    assert "checksum mismatch in tensor model." in results[0][1]
    assert sorted(cause for _, _, cause, _ in results) == ["NoneType"] + [RankFailedError.__name__] * 3


def _damage_in_memory(rank: int, world_size: int, path: str, first: str) -> Any:
    tensors = like(content())
    pieces = []

    def damage(span: telemetry.Span) -> None:
        """Damage rank 1's memory after it has verified the first packet from rank 0 and before it forwards it."""
        if span.name == "exchange":
            pieces.append(span)
            if len(pieces) == 1:
                tensors[first].view(-1).view(torch.uint8)[0] ^= 1

    stop = telemetry.record(damage) if rank == 1 else lambda: None
    try:
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        stop()
    return None


def test_the_next_rank_detects_damage_in_transit(rank_pool: RankPool, saved: Path) -> None:
    manifest = bcp.open(saved).manifest
    names = [manifest.tensors.fqn_of(int(manifest.shards.tensor[row])) for row in manifest.shards_in(0)]
    results = rank_pool.run(_damage_in_memory, str(saved), names[0], world_size=3)
    assert len(set(results)) == 1
    assert results[0][0] == CorruptionError.__name__
    assert f"tensor model.{names[0]}" in results[0][1]
    assert "arrived damaged from rank 1; rank 0 had read and verified it" in results[0][1]


def _die_while_reading(rank: int, world_size: int, path: str, dying: int) -> Any:
    tensors = like(content())
    if rank == dying:
        # In the middle of the exchange, after some packets were forwarded.
        telemetry.record(lambda span: os.kill(os.getpid(), signal.SIGKILL) if span.name == "exchange" else None)
    try:
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("dying", [0, 2])
def test_all_ranks_name_a_rank_that_was_killed_in_the_ring(rank_pool: RankPool, saved: Path, dying: int) -> None:
    results = rank_pool.run(_die_while_reading, str(saved), dying, world_size=4, expect_death={dying: signal.SIGKILL})
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 3
    assert {name for name, _ in survivors} == {RankFailedError.__name__}
    assert all(f"rank {dying} on " in text and "ended" in text for _, text in survivors)


def _load_again_and_again(rank: int, world_size: int, path: str, times: int) -> Any:
    before = held_now()
    for number in range(times + 1):
        tensors = like(content())
        bcp.load(path, {"model": tensors}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(60)))
        assert equal(tensors, content())
        if number == 0:
            before = held_now()
    return left_since(before, turns=times)


def test_many_loads_leave_no_connections(rank_pool: RankPool, saved: Path) -> None:
    assert rank_pool.run(_load_again_and_again, str(saved), 5, world_size=2) == [[]] * 2
