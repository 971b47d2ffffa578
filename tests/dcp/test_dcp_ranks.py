"""DCP on several ranks, with torch's storage classes and with those of this library."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_storages import STORAGES, both, causes, load, save
from layouts import LAYOUTS, Built, build, differences
from sampling import is_full, sample
from titan_layouts import build_titan, gathered
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(5, of=__name__)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# ---------------------------------------------------------------------------------------------- models and optimizers

NAMES = sample(
    ["plain-1", "ddp-2", "fsdp1-full-orig-2", "fsdp2-2", "tp-2", "fsdp2-3", "fsdp2-4", "hsdp-4", "fsdp2-tp-4"], 4
)

# How a checkpoint is written, and how it is read.
WAYS = {
    **({"torch": ("torch", "torch")} if is_full() else {}),
    "bytecheckpoint": ("bytecheckpoint", "bytecheckpoint"),
    "dcp.save, bcp.load": ("bytecheckpoint", "bcp"),
    "bcp.save, dcp.load": ("bcp", "bytecheckpoint"),
}


def _state(built: Built) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(built.model),
        "optimizer": get_optimizer_state_dict(built.model, built.optimizer, options=FLAT),
    }


def _save_layouts(rank: int, world_size: int, names: list[str], root: str) -> None:
    for name in names:
        built = build(name, seed=1, steps=2)
        bcp.save(f"{root}/{name}-bcp", built.state).result()
        for storage in ("bytecheckpoint", *(["torch"] if "torch" in WAYS else [])):
            save(storage, f"{root}/{name}-{storage}", _state(built))


def _load_layouts(rank: int, world_size: int, name: str, root: str) -> dict[str, list[str]]:
    expected = build(name, seed=1, steps=2)
    wrong = {}
    for saved in NAMES:
        for way, (written_by, read_by) in WAYS.items():
            built = build(name, seed=2, steps=0)
            path = f"{root}/{saved}-{written_by}"
            if read_by == "bcp":
                bcp.load(path, built.state)
            else:
                state = _state(built)
                load(read_by, path, state)
                set_model_state_dict(built.model, state["model"])
                set_optimizer_state_dict(built.model, built.optimizer, state["optimizer"], options=FLAT)
            if bad := differences(built, expected):
                wrong[f"{saved}, {way}"] = bad
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> str:
    root = str(tmp_path_factory.mktemp("layouts"))
    for world_size in sorted({LAYOUTS[name].world_size for name in NAMES}):
        names = [name for name in NAMES if LAYOUTS[name].world_size == world_size]
        rank_pool.run(_save_layouts, names, root, world_size=world_size, timeout_s=120)
    return root


@pytest.mark.parametrize("target", sample(NAMES, 2))
def test_every_layout_loads_into_every_other(target: str, saved: str, rank_pool: RankPool) -> None:
    world_size = LAYOUTS[target].world_size
    results = rank_pool.run(_load_layouts, target, saved, world_size=world_size, timeout_s=240)
    assert results == [{}] * world_size


def _save_experts(rank: int, world_size: int, name: str, root: str) -> dict[str, torch.Tensor]:
    built = build_titan(name, seed=1)
    built.step()
    state = {"model": built.model.state_dict(), "optimizer": get_optimizer_state_dict(built.model, built.optimizer)}
    for storage in STORAGES:
        save(storage, f"{root}/{storage}", state)
    return gathered(built)


def _load_experts(rank: int, world_size: int, name: str, path: str, storage: str) -> dict[str, torch.Tensor]:
    built = build_titan(name, seed=2)
    state = {"model": built.model.state_dict(), "optimizer": get_optimizer_state_dict(built.model, built.optimizer)}
    load(storage, path, state)
    set_optimizer_state_dict(built.model, built.optimizer, state["optimizer"])
    return gathered(built)


@both
def test_a_mixture_of_experts_changes_its_expert_parallelism(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    expected = rank_pool.run(_save_experts, "ep-dim1-4", str(tmp_path), world_size=4, timeout_s=120)[0]
    for name, world_size in (("ep-etp-4", 4), ("fsdp-dim1-2", 2)):
        path = str(tmp_path / storage)
        found = rank_pool.run(_load_experts, name, path, storage, world_size=world_size, timeout_s=120)[0]
        assert found.keys() == expected.keys()
        assert not [key for key in found if not torch.equal(found[key], expected[key])]


# ------------------------------------------------------------------------------------------------------------- tensors


def _meshes(world_size: int) -> list[Any]:
    flat = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2))
    return [
        *((flat, [place]) for place in (Shard(0), Shard(1), Replicate())),
        *((grid, [a, b]) for a in (Shard(0), Replicate()) for b in (Shard(0), Shard(1), Replicate())),
    ]


SHAPES = ((5, 3), (1, 4), (8, 6), (2, 0), (7,))


def _tensors(mesh: Any, places: list[Any], fill: float) -> dict[str, torch.Tensor]:
    found = {}
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
        fitting = [Replicate() if place.is_shard(1) and len(shape) == 1 else place for place in places]
        found[str(shape)] = distribute_tensor(whole * fill, mesh, fitting)
    return found


def _reshard(rank: int, world_size: int, root: str, storage: str) -> list[str]:
    wrong = []
    layouts = _meshes(world_size)
    for number, (mesh, places) in enumerate(layouts):
        save(storage, f"{root}/{number}", {"t": _tensors(mesh, places, 1.0)})
        for other, (new_mesh, new_places) in enumerate(layouts):
            state = {"t": _tensors(new_mesh, new_places, 0.0)}
            load(storage, f"{root}/{number}", state)
            for name, expected in _tensors(new_mesh, new_places, 1.0).items():
                if not torch.equal(state["t"][name].to_local(), expected.to_local()):
                    wrong.append(f"{number} to {other}: {name}")
    return wrong


@both
def test_dtensors_of_one_and_two_dimensional_meshes(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_reshard, str(tmp_path), storage, world_size=4, timeout_s=240) == [[]] * 4
    if storage == "bytecheckpoint":
        for number in range(9):
            checkpoint = bcp.open(tmp_path / str(number))
            assert checkpoint.verify().ok
            for shape in SHAPES:
                whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
                assert torch.equal(checkpoint[f"t.{shape}"][...], whole)


def _sub_mesh(rank: int, world_size: int, path: str, storage: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    whole = torch.arange(6.0).reshape(3, 2)
    state = {"t": {f"of {rank // 2}": distribute_tensor(whole + rank // 2, half, [Shard(0)])}}
    save(storage, path, state)
    found = {"t": {name: tensor.clone().detach() * 0 for name, tensor in state["t"].items()}}
    load(storage, path, found)
    (tensor,) = found["t"].values()
    return tensor.full_tensor().flatten().tolist()


@both
def test_tensors_of_a_part_of_the_ranks(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_sub_mesh, str(tmp_path / "c"), storage, world_size=4)
    assert found == [[0, 1, 2, 3, 4, 5]] * 2 + [[1, 2, 3, 4, 5, 6]] * 2


def _sharded(dim: int, world_size: int, fill: float) -> Any:
    spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(world_size)])
    tensor = sharded_tensor.empty(spec, 5, 4)
    whole = torch.arange(20.0).reshape(5, 4) * fill
    for shard in tensor.local_shards():
        begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]])
    return tensor


def _reshard_sharded(rank: int, world_size: int, root: str, storage: str) -> bool:
    for dim in (0, 1):
        save(storage, f"{root}/{dim}", {"t": {"w": _sharded(dim, world_size, 1.0)}})
        for other in (0, 1):
            state = {"t": {"w": _sharded(other, world_size, 0.0)}}
            load(storage, f"{root}/{dim}", state)
            expected = _sharded(other, world_size, 1.0).local_shards()
            pairs = zip(state["t"]["w"].local_shards(), expected)
            if not all(torch.equal(found.tensor, one.tensor) for found, one in pairs):
                return False
        plain = {"t": {"w": torch.zeros(5, 4)}}
        load(storage, f"{root}/{dim}", plain)
        if not torch.equal(plain["t"]["w"], torch.arange(20.0).reshape(5, 4)):
            return False
    return True


@both
def test_sharded_tensors(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_reshard_sharded, str(tmp_path), storage, world_size=3) == [True] * 3


# --------------------------------------------------------------------------------------------------------------- modes


def _in_group(rank: int, world_size: int, path: str, storage: str) -> int:
    group = dist.new_group([1, 2])
    if rank == 0:
        return -1
    state = {"t": {"w": torch.full((3,), 7)}, "step": 4}
    save(storage, path, state, process_group=group)
    found = {"t": {"w": torch.zeros(3, dtype=torch.int64)}, "step": 0}
    load(storage, path, found, process_group=group)
    return int(found["t"]["w"].sum()) + found["step"]


def _no_collectives(rank: int, world_size: int, path: str, storage: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    state = {"t": {"w": sharded, "same": torch.ones(3), "own": torch.full((2,), rank)}, "rank": rank, "step": 9}
    save(storage, path, state, use_collectives=False)
    found = {
        "t": {"w": sharded * 0, "same": torch.zeros(3), "own": torch.zeros(2, dtype=torch.int64)},
        "rank": -1,
        "step": -1,
    }
    load(storage, path, found)
    t = found["t"]
    return [t["w"].full_tensor().tolist(), t["same"].tolist(), t["own"].tolist(), found["rank"], found["step"]]


@both
def test_without_collectives(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_no_collectives, str(tmp_path / "c"), storage, world_size=2)
    assert found == [[[0, 1, 2, 3, 4, 5, 6], [1, 1, 1], [rank] * 2, rank, 9] for rank in range(2)]
    if storage == "bytecheckpoint":
        checkpoint = bcp.open(tmp_path / "c")
        assert checkpoint.verify().ok
        assert sorted(checkpoint) == ["t.own@0", "t.own@1", "t.same", "t.w"]
        assert checkpoint["t.w"][...].tolist() == list(range(7))
        state: dict[str, Any] = {"t": {"w": torch.zeros(7), "same": torch.zeros(3)}}
        bcp.load(tmp_path / "c", state, strict=False, options=bcp.LoadOptions(per_rank="lowest"))
        assert state["t"]["w"].tolist() == list(range(7))


@both
def test_a_group_of_some_ranks(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_in_group, str(tmp_path / "c"), storage, world_size=3) == [-1, 25, 25]


def _async(rank: int, world_size: int, root: str, storage: str) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size,))
    writer = STORAGES[storage].writer(root)
    tensor = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            state = {"t": {"w": tensor}, "step": step}
            dcp.async_save(state, checkpoint_id=f"{root}/{step}", storage_writer=writer).result()
            tensor += 1
    found = []
    for step in range(3):
        state = {"t": {"w": torch.zeros(6)}, "step": -1}
        load(storage, f"{root}/{step}", state)
        found += [float(state["t"]["w"].sum()), state["step"]]
    return found


@both
def test_async_saves_of_two_ranks(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_async, str(tmp_path), storage, world_size=2) == [[0, 0, 6, 1, 12, 2]] * 2


class _CachedPlans(DefaultSavePlanner):
    pass


def _cached(rank: int, world_size: int, root: str, storage: str) -> list[float]:
    _CachedPlans.__name__ = f"cached {storage}"  # torch caches by this name
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for step in range(4):
        # In the third save, rank 1 alone has another plan.
        size = 5 if step == 2 else 3
        own = {"w": torch.full((size,), step)} if rank == 1 else {}
        state = {"t": {"all": distribute_tensor(torch.full((4,), float(step)), mesh, [Shard(0)]), **own}}
        save(storage, f"{root}/c", state, planner=_CachedPlans(enable_plan_caching=True))
        read = {"t": {"all": torch.zeros(4), "w": torch.zeros(size, dtype=torch.int64)}}
        load(storage, f"{root}/c", read)
        found += [float(read["t"]["all"].sum()), int(read["t"]["w"].sum())]
    return found


@both
def test_cached_plans(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_cached, str(tmp_path), storage, world_size=2)
    assert found == [[0, 0, 4, 3, 8, 10, 12, 9]] * 2
    if storage == "bytecheckpoint":
        assert bcp.open(tmp_path / "c").verify().ok
        assert len(list((tmp_path / "c").iterdir())) == 2


# ------------------------------------------------------------------------------------------------------------ failures

WRITER_STEPS = {
    "set_up_storage_writer": 1, "prepare_local_plan": 1, "prepare_global_plan": 0, "write_data": 1, "finish": 0,
}  # fmt: skip
READER_STEPS = {
    "read_metadata": 1, "set_up_storage_reader": 1, "prepare_local_plan": 1, "prepare_global_plan": 0, "read_data": 1,
}  # fmt: skip


def _failing(kind: type, step: str, failing_rank: int) -> type:
    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == failing_rank:
            raise OSError(f"no {step}")
        return getattr(kind, step)(self, *args, **kwargs)

    return type("Failing", (kind,), {step: fail})


def _fail(rank: int, world_size: int, root: str, storage: str) -> list[str]:
    wrong = []
    mesh = init_device_mesh("cpu", (world_size,))

    def state(fill: float) -> dict[str, Any]:
        return {"t": {"w": distribute_tensor(torch.full((4,), fill), mesh, [Shard(0)])}, "step": int(fill)}

    def value(reader: Any = None) -> float:
        found = state(-1)
        load(storage, f"{root}/c", found, reader=reader)
        return float(found["t"]["w"].full_tensor().sum()) / 4

    save(storage, f"{root}/c", state(1))
    for steps, kind in ((WRITER_STEPS, STORAGES[storage].writer), (READER_STEPS, STORAGES[storage].reader)):
        for step, failing_rank in steps.items():
            broken = _failing(kind, step, failing_rank)(f"{root}/c")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if steps is WRITER_STEPS:
                        dcp.save(state(2), storage_writer=broken)
                    else:
                        value(broken)
                wrong.append(f"{step} did not fail")
            except CheckpointException as error:
                if list(error.failures) != [failing_rank] or (
                    step != "read_metadata" and str(causes(error)[0]) != f"no {step}"
                ):
                    wrong.append(f"{step}: {error}")
            if steps is WRITER_STEPS and storage == "bytecheckpoint" and value() != 1:
                wrong.append(f"{step}: the old checkpoint is gone")
    save(storage, f"{root}/c", state(3))
    return wrong if value() == 3 else [*wrong, "the next save did not work"]


@both
def test_a_failure_in_any_step_fails_all_ranks(storage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_fail, str(tmp_path), storage, world_size=2, timeout_s=120) == [[], []]


def _different_paths(rank: int, world_size: int, root: str) -> str:
    try:
        save("bytecheckpoint", f"{root}/{rank}", {"t": {"w": torch.ones(2), f"of {rank}": torch.ones(3)}})
    except CheckpointException as error:
        return f"{type(causes(error)[0]).__name__}"
    return "saved"


def test_ranks_with_different_paths_do_not_commit(rank_pool: RankPool, tmp_path: Path) -> None:
    """Torch saves without an error, and nothing can be loaded."""
    assert rank_pool.run(_different_paths, str(tmp_path), world_size=2) == ["DisagreementError"] * 2
    assert not list(tmp_path.rglob("manifest.msgpack"))


def _corrupted(rank: int, world_size: int, path: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    save("bytecheckpoint", path, {"t": {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}})
    if rank == 0:
        (file,) = Path(path).rglob("t-00001.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    dist.barrier()
    state = {"t": {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}}
    try:
        load("bytecheckpoint", path, state)
    except CheckpointException as error:
        return [list(error.failures), type(causes(error)[0]).__name__]
    return []


def test_damage_that_one_rank_reads_is_an_error_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_corrupted, str(tmp_path / "c"), world_size=2)
    assert found == [[[1], "CorruptionError"]] * 2


def _overlapping(rank: int, world_size: int, path: str) -> str:
    class NoDeduplication(DefaultSavePlanner):
        def _dedup_save_plans(self, all_plans: Any) -> Any:
            return all_plans

    mesh = init_device_mesh("cpu", (world_size,))
    replicated = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    try:
        save("bytecheckpoint", path, {"t": {"w": replicated}}, planner=NoDeduplication())
    except CheckpointException as error:
        return str(causes(error)[0])
    return "saved"


def test_replicas_that_the_planner_left_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_overlapping, str(tmp_path / "c"), world_size=2)
    # The library says where; torch up to 2.12 refuses the plan before.
    assert all("overlap" in text or text == "Failed to validate global plan" for text in found), found
    assert not list(tmp_path.rglob("*.safetensors"))
