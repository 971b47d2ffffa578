"""Replicas that have diverged: a save finds them before it stores one copy and drops the others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from damage import keys_of
from generated_states import OwnFormat
from message_watch import counted_messages
from sorted_arguments import loading, saving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.frameworks.digests import device_digest, tensor_digest
from bytecheckpoint.saving.replicas import SAMPLE
from bytecheckpoint.tensors.shards import basic_meta
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 4
LIMIT = {"deadline_s": time_limit(30)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)), nn.BatchNorm1d(3))


def _trained(model: nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(seed)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


def _attempt(root: str, name: str, state: dict[str, Any], **options: Any) -> tuple[str, str]:
    """What the save raised or, on rank 0, logged as a warning."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytecheckpoint.saving.planning")
    logger.addHandler(handler)
    try:
        bcp.save(f"{root}/{name}", state, **saving(**{**LIMIT, **options}))
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        logger.removeHandler(handler)
    return ("warned", warnings[0]) if warnings else ("saved", "")


# -- nothing declares that tensors are replicas ------------------------------------------------------------------------


def _save_plain(rank: int, world_size: int, root: str, what: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    model = _model()
    state: dict[str, Any] = {"model": model, "optimizer": _trained(model)}
    results = [_attempt(root, "equal", state, **options)]
    if what == "element" and rank == 2:
        model[7].weight.data[1, 2] += 1
    if what == "optimizer" and rank == 3:
        state["optimizer"].state[model[4].bias]["exp_avg"][0] += 1
    if what == "all":
        state["model"] = _model(rank)
        state["optimizer"] = _trained(state["model"])
    if what == "shape" and rank == 1:
        state["model"] = nn.Sequential(nn.Linear(3, 5))
        state["optimizer"] = _trained(state["model"])
    if what == "buffer":
        model[-1].running_mean.fill_(rank)
    return [*results, _attempt(root, "next", state, **options), _attempt(root, "again", state, **options)]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("element", "model.7.weight: rank(s) 0-1,3 hold one copy, rank(s) 2 hold another copy"),
        ("optimizer", "optimizer.state.4.bias.exp_avg: rank(s) 0-2 hold one copy, rank(s) 3 hold another"),
        ("all", "and "),
        ("shape", "model.0.weight: rank(s) 0,2-3 hold one copy of float32[3, 3], rank(s) 1 hold another copy of"),
    ],
)
def test_parameters_that_differ_are_refused(pool: RankPool, tmp_path: Path, what: str, name: str) -> None:
    for first, *later in pool.run(_save_plain, str(tmp_path), what, {}):
        assert first[0] == "saved", first
        for kind, message in later:
            assert kind == "ReplicaMismatchError", (kind, message)
            assert name in message
            assert "replicas='own'" in message
    assert keys_of(tmp_path / "next") == []


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_plan_is_reused_while_replicas_are_equal(pool: RankPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(_rounds_of_saves, str(tmp_path), kind) == [[False, False]] * WORLD


def _rounds_of_saves(rank: int, world_size: int, root: str, kind: str) -> list[bool]:
    """Whether each save after the first planned anew."""
    model = _ddp() if kind == "ddp" else _model()
    state = {"model": model, "optimizer": _trained(model)}
    planned = []
    for number in range(3):
        with counted_messages() as watch:
            bcp.save(f"{root}/{number}", state, **saving(**LIMIT))
        planned.append(watch.has_new_plan)
    return planned[1:]


def test_running_statistics_may_differ(pool: RankPool, tmp_path: Path) -> None:
    assert {kind for of_rank in pool.run(_save_plain, str(tmp_path), "buffer", {}) for kind, _ in of_rank} == {"saved"}


def _save_trusted(rank: int, world_size: int, root: str) -> list[float]:
    model = _model(rank)
    bcp.save(f"{root}/trusted", {"model": model}, **saving(replicas="trust", **LIMIT))
    return model[3].weight.flatten().tolist()


def test_trust_stores_any_copy(pool: RankPool, tmp_path: Path) -> None:
    copies = pool.run(_save_trusted, str(tmp_path))
    assert bcp.open(tmp_path / "trusted")["model.3.weight"][...].flatten().tolist() in copies


def _save_and_load_own(rank: int, world_size: int, root: str) -> bool:
    model = _model(rank)
    optimizer = _trained(model, rank)
    frozen = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    bcp.save(f"{root}/own", {"model": model, "optimizer": optimizer}, **saving(replicas="own", **LIMIT))
    other = _model(99)
    fresh = torch.optim.Adam(other.parameters())
    bcp.load(f"{root}/own", {"model": other, "optimizer": fresh}, **loading(**LIMIT))
    return all(map(torch.equal, other.parameters(), frozen)) and all(
        torch.equal(fresh.state[parameter]["exp_avg"], moment)
        for parameter, moment in zip(other.parameters(), moments, strict=True)
    )


def test_own_stores_and_loads_every_ranks_copy(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_save_and_load_own, str(tmp_path)) == [True] * WORLD
    with pytest.raises(bcp.errors.MismatchError, match="stored for each rank of another world size"):
        bcp.load(tmp_path / "own", {"model": _model()})


def _save_stages(rank: int, world_size: int, root: str) -> tuple[str, str]:
    """Two stages with different names, each on two ranks."""
    stage = rank // 2
    model = nn.ModuleDict({f"layer{stage}": _model(stage)})
    return _attempt(root, "stages", {"model": model})


def test_stages_with_different_names_are_not_replicas(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_save_stages, str(tmp_path)) == [("saved", "")] * WORLD
    stored = bcp.open(tmp_path / "stages")
    assert torch.equal(stored["model.layer1.0.weight"][...], _model(1)[0].weight)


def _save_extra_state(rank: int, world_size: int, root: str) -> float:
    class Scaled(nn.Linear):
        scale = torch.zeros(())

        def get_extra_state(self) -> dict[str, torch.Tensor]:
            return {"scale": self.scale}

        def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
            self.scale = state["scale"]

    torch.manual_seed(0)
    model = Scaled(3, 3)
    model.scale = torch.tensor(float(rank))
    bcp.save(f"{root}/extra", {"model": model}, **saving(**LIMIT))
    model.scale = torch.tensor(-1.0)
    bcp.load(f"{root}/extra", {"model": model}, **loading(**LIMIT))
    return float(model.scale)


def test_extra_state_that_differs_is_stored_for_each_rank(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_save_extra_state, str(tmp_path)) == [0.0, 1.0, 2.0, 3.0]


def _save_own_format(rank: int, world_size: int, root: str) -> list[float]:
    torch.manual_seed(0)
    model = OwnFormat()
    found = []
    for packed in (7.0, float(rank)):
        model.packed = torch.full((3,), packed)
        bcp.save(f"{root}/own-{packed == 7}", {"model": model}, **saving(**LIMIT))
        model.packed = torch.zeros(3)
        bcp.load(f"{root}/own-{packed == 7}", {"model": model}, **loading(**LIMIT))
        found += model.packed.unique().tolist()
    return found


def test_tensors_that_only_a_module_stores_are_compared(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(_save_own_format, str(tmp_path))
    assert found == [[7.0, float(rank)] for rank in range(WORLD)]


# -- the state declares replicas ---------------------------------------------------------------------------------------


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model())


def _replicated() -> nn.Module:
    model, mesh = _model(), init_device_mesh("cpu", (WORLD,))
    for module in model:
        module._parameters = {
            name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
            for name, parameter in module._parameters.items()
        }
    return model


def _hsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(_model(), mesh=mesh)


MAKE: dict[str, Callable[[], nn.Module]] = {"ddp": _ddp, "replicate": _replicated, "hsdp": _hsdp}


def _diverge(model: nn.Module, names: set[str] | None = None) -> None:
    """Change an element of this rank's copy of the parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.numel() and (names is None or name.removeprefix("module.") in names):
                local.view(-1)[0] += 1


def _save_declared(rank: int, world_size: int, root: str, kind: str, how: str) -> list[tuple[str, str]]:
    model = MAKE[kind]()
    options = {} if how in ("sample", "rounds") else {"replicas": how}
    results = [_attempt(root, "equal", {"model": model}, **options)]
    if rank == 3:
        _diverge(model, {"7.weight"} if how in ("check", "rounds") else None)
    rounds = {"sample": SAMPLE, "rounds": 8 * SAMPLE}.get(how, 1)
    for number in range(rounds):
        results.append(_attempt(root, f"next-{number}", {"model": model}, **options))
        found = torch.tensor(int(results[-1][0] != "saved"))
        dist.all_reduce(found)
        if found:
            break
    if rank == 3:  # its next save works again
        _diverge(model)
    dist.barrier()
    fixed = _attempt(root, "fixed", {"model": _model()})
    return [*results, fixed]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("how", ["sample", "check"])
def test_declared_replicas_that_diverge_are_named(pool: RankPool, tmp_path: Path, kind: str, how: str) -> None:
    others = "1" if kind == "hsdp" else "0-2"
    for rank, (first, *_, last, fixed) in enumerate(pool.run(_save_declared, str(tmp_path), kind, how)):
        assert first[0] == fixed[0] == "saved", (first, fixed)
        if how == "sample" and rank != 0:
            assert last[0] == "saved", last
            continue
        assert last[0] == ("ReplicaMismatchError" if how == "check" else "warned"), last
        assert f"rank(s) {others} hold one copy, rank(s) 3 hold another copy" in last[1]
        assert "DistributedDataParallel, Replicate() or HSDP" in last[1]
        if how == "check":
            assert "1 tensor of the state" in last[1]
            assert "model.7.weight:" in last[1]


def test_samples_find_a_single_tensor_in_the_end(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_save_declared, str(tmp_path), "ddp", "rounds")[0]
    assert results[-2][0] == "warned", f"not found in {len(results)} saves"
    assert "model.7.weight:" in results[-2][1]


def test_trust_compares_no_declared_replicas(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_save_declared, str(tmp_path), "ddp", "trust")
    assert {kind for of_rank in results for kind, _ in of_rank} == {"saved"}


def _save_partial_state(rank: int, world_size: int, root: str, kind: str) -> list[tuple[str, str]]:
    """Optimizers of which each rank holds a part of the state, although the parameters are replicas."""
    model = _ddp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import compiles with torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    if kind == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    else:
        optimizer = torch.optim.Adam(list(model.parameters())[rank::world_size], lr=0.0)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    results = [_attempt(root, f"{number}", state, replicas="check") for number in range(2)]
    with counted_messages() as watch:
        results.append(_attempt(root, "planned", state, replicas="check"))
    if kind == "zero":
        assert not watch.has_new_plan
    return results


@pytest.mark.parametrize("kind", ["zero", "by hand"])
def test_state_that_a_rank_lacks_has_not_diverged(pool: RankPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(_save_partial_state, str(tmp_path), kind) == [[("saved", "")] * 3] * WORLD
    stored = bcp.open(tmp_path / "planned")
    assert sum(name.endswith(".exp_avg") for name in stored) == len(list(_model().parameters()))


# -- digests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
def test_the_digest_of_a_device_depends_on_every_byte(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    tensor = torch.from_numpy(rng.integers(0, 2, 1003 * 8, dtype=np.uint8))[: 1003 * dtype.itemsize].view(dtype)
    flat = tensor.view(torch.uint8)
    digests = {device_digest(flat)}
    for _ in range(100):
        at = int(rng.integers(flat.numel()))
        changed = flat.clone()
        changed[at] ^= 1
        digests.add(device_digest(changed))
        swapped = flat.roll(1)
        digests.add(device_digest(swapped))
    assert len(digests) > 90
    assert device_digest(flat.clone()) == device_digest(flat)
    shifted = torch.cat([flat.new_zeros(3), flat])[3:]
    assert device_digest(shifted) == device_digest(flat), "the memory's alignment does not matter"


def test_the_digest_covers_dtype_shape_and_bytes() -> None:
    tensor = torch.arange(6.0)
    digests = {
        tensor_digest(basic_meta(one.dtype, one.shape), one)
        for one in (tensor, tensor.view(2, 3), tensor.view(2, 3).t(), tensor.view(torch.int32), tensor + 1)
    }
    assert len(digests) == 5
    strided = torch.arange(12.0)[::2]
    meta = basic_meta(strided.dtype, strided.shape)
    assert tensor_digest(meta, strided) == tensor_digest(meta, strided.contiguous())
