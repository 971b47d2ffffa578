"""The layouts of the reshard matrix: one small model with difficult shapes, sharded in every supported way.

This module does not use the library. The model starts from the same full values in every layout. Two optimizer steps,
whose gradients are elementwise functions of the parameters, give parameters and optimizer state that are bit for bit
equal in all layouts. So ``build(layout, seed=1)`` on the same ranks is the expected result of a load.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)  # 10 rows: uneven over 3 and 4
        self.down = nn.Linear(10, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Nasty(nn.Module):
    """Indivisible dimensions, one smaller than any world, one element, no element, 0-d tensors and unusual dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tiny = nn.Parameter(torch.zeros(1, 3, 2))  # 1 row: smaller than the world
        self.gain = nn.Parameter(torch.zeros(1))
        self.cube = nn.Parameter(torch.zeros(3, 5, 2))
        self.experts = nn.Parameter(torch.zeros(8, 2, 3))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("coarse", torch.zeros(3, 2, dtype=torch.bfloat16))


def fill(module: nn.Module, seed: int) -> None:
    """Fill with values that are unique per tensor name, element and seed."""
    with torch.no_grad():
        for number, (_, tensor) in enumerate(sorted([*module.named_parameters(), *module.named_buffers()])):
            ramp = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
            values = torch.sin(ramp * 0.7 + number + 10 * seed) if tensor.is_floating_point() else ramp + number + seed
            tensor.copy_(values % 2 == 0 if tensor.dtype == torch.bool else values)


@dataclass
class Built:
    """The modules of this rank in one layout, and the optimizer of their parameters."""

    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.model) if isinstance(self.model, (list, tuple)) else [self.model]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Make one optimizer step with gradients that are equal in every layout."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.numel():
                    parameter.grad = (parameter.detach() * 0.5 + 0.25).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Layout:
    name: str
    world_size: int
    wrap: Callable[[Nasty], Any]
    orig_params: bool = True


def _plain(model: Nasty) -> nn.Module:
    return model


def _ddp(model: Nasty) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(strategy: ShardingStrategy, orig: bool, nested: bool) -> Callable[[Nasty], nn.Module]:
    def wrap(model: Nasty) -> nn.Module:
        mesh = None
        if strategy is ShardingStrategy.HYBRID_SHARD:
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP-1 and NO_SHARD are deprecated
            return FSDP(
                model,
                sharding_strategy=strategy,
                use_orig_params=orig,
                auto_wrap_policy=ModuleWrapPolicy({Block}) if nested else None,
                device_id=torch.device("cpu"),
                device_mesh=mesh,
            )

    return wrap


def _shard_all(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(model: Nasty) -> nn.Module:
    return _shard_all(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: Nasty) -> nn.Module:
    return _shard_all(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {}
    if hasattr(model, "emb"):
        plan["emb"] = RowwiseParallel()
    for index in range(len(getattr(model, "blocks", []))):
        plan[f"blocks.{index}.norm"] = SequenceParallel()
        plan[f"blocks.{index}.up"] = ColwiseParallel()
        plan[f"blocks.{index}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    if hasattr(model, "experts"):
        model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0)]))  # expert parallel
    return model


def _tp(model: Nasty) -> nn.Module:
    return _parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def _fsdp2_tp(model: Nasty) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return _shard_all(_parallelize(model, mesh["tp"]), mesh["dp"])


def _hsdp_tp(model: Nasty) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("r", "s", "tp"))
    return _shard_all(_parallelize(model, mesh["tp"]), mesh["r", "s"])


def _hsdp_cp(model: Nasty) -> nn.Module:
    """Sharded over a data-parallel and a context-parallel dimension, which FSDP sees as one."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("r", "s", "cp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flattened dimensions are experimental
        mesh["s", "cp"]._flatten("s_cp")
        return _shard_all(model, mesh["r", "s_cp"])


class _Stage(nn.Module):
    """A pipeline stage that keeps the names of the full model."""


def _stage(model: Nasty, index: int) -> nn.Module:
    stage = _Stage()
    blocks = nn.ModuleDict({str(index): model.blocks[index]})
    stage.add_module("blocks", blocks)
    names = ["tiny", "gain", "mask", "empty"] if index == 0 else ["cube", "experts", "coarse"]
    if index == 0:
        stage.add_module("emb", model.emb)
    for name in names:
        value = getattr(model, name)
        if isinstance(value, nn.Parameter):
            stage.register_parameter(name, value)
        else:
            stage.register_buffer(name, value)
    return stage


def _pp(model: Nasty) -> nn.Module:
    return _stage(model, dist.get_rank() % 2)


def _virtual_pp(model: Nasty) -> list[nn.Module]:
    return [_stage(model, 0), _stage(model, 1)] if dist.get_rank() == 0 else [_stage(model, 1)]


def _pp_fsdp2_tp(model: Nasty) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage = _stage(model, mesh["pp"].get_local_rank())
    plan: dict[str, Any] = {}
    for key in stage.blocks:
        plan |= {f"blocks.{key}.up": ColwiseParallel(), f"blocks.{key}.down": RowwiseParallel()}
    if hasattr(stage, "emb"):
        plan["emb"] = RowwiseParallel()
    parallelize_module(stage, mesh["tp"], plan)
    if hasattr(stage, "experts"):
        stage.experts = nn.Parameter(distribute_tensor(stage.experts.detach(), mesh["tp"], [Shard(0)]))
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


_S = ShardingStrategy
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("plain-1", 1, _plain),
        Layout("ddp-2", 2, _ddp),
        Layout("fsdp1-full-orig-2", 2, _fsdp1(_S.FULL_SHARD, True, True)),
        Layout("fsdp1-full-flat-4", 4, _fsdp1(_S.FULL_SHARD, False, True), orig_params=False),
        Layout("fsdp1-full-flat-root-3", 3, _fsdp1(_S.FULL_SHARD, False, False), orig_params=False),
        Layout("fsdp1-gradop-orig-3", 3, _fsdp1(_S.SHARD_GRAD_OP, True, False)),
        Layout("fsdp1-hybrid-orig-4", 4, _fsdp1(_S.HYBRID_SHARD, True, True)),
        Layout("fsdp1-noshard-orig-2", 2, _fsdp1(_S.NO_SHARD, True, True)),
        Layout("fsdp1-noshard-flat-2", 2, _fsdp1(_S.NO_SHARD, False, False), orig_params=False),
        Layout("fsdp2-2", 2, _fsdp2),
        Layout("fsdp2-3", 3, _fsdp2),
        Layout("fsdp2-4", 4, _fsdp2),
        Layout("hsdp-4", 4, _hsdp),
        Layout("hsdp-cp-4", 4, _hsdp_cp),
        Layout("tp-2", 2, _tp),
        Layout("tp-4", 4, _tp),
        Layout("fsdp2-tp-4", 4, _fsdp2_tp),
        Layout("pp-2", 2, _pp),
        Layout("pp-virtual-2", 2, _virtual_pp),
        Layout("hsdp-tp-8", 8, _hsdp_tp),
        Layout("pp-fsdp2-tp-8", 8, _pp_fsdp2_tp),
    )
}


def build(name: str, seed: int, *, steps: int) -> Built:
    """Build the layout on this process group, with the values of ``seed``, after ``steps`` optimizer steps."""
    layout = LAYOUTS[name]
    model = Nasty()
    fill(model, seed)
    wrapped = layout.wrap(model)
    modules = list(wrapped) if isinstance(wrapped, (list, tuple)) else [wrapped]
    optimizer = _optimizer(modules, layout.orig_params, seed)
    built = Built(wrapped, optimizer)
    for _ in range(steps):
        built.step()
    return built


def _optimizer(modules: list[nn.Module], orig_params: bool, seed: int) -> torch.optim.Optimizer:
    """Use two groups with different hyper-parameters, or one if flat parameters do not separate them."""
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    if not orig_params:
        return torch.optim.AdamW([p for _, p in named], lr=1e-2 * seed, weight_decay=0.1, amsgrad=True)
    # Equal hyper-parameters, so that layouts with flat and with original parameters can load each other.
    odd = [p for name, p in named if "norm" in name]
    even = [p for name, p in named if "norm" not in name]
    common = {"lr": 1e-2 * seed, "weight_decay": 0.1}
    return torch.optim.AdamW([{"params": odd, **common}, {"params": even, **common}], amsgrad=True)


def local_tensors(built: Built) -> Iterator[tuple[str, torch.Tensor]]:
    """Return every local tensor of this rank: parameters, persistent buffers, optimizer state."""
    for at, module in enumerate(built.modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if "scratch" not in name:
                yield f"{at}:{name}", _without_padding(_local(tensor), tensor)
    for at, group in enumerate(built.optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            for key, value in built.optimizer.state.get(parameter, {}).items():
                tensor = _local(torch.as_tensor(value))
                yield f"group {at}, parameter {index}: {key}", _without_padding(tensor, parameter)
        yield f"group {at}: lr", torch.tensor(group["lr"])


def _without_padding(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Remove the padding of FSDP-1's flat parameters, whose contents are undefined."""
    padding = getattr(parameter, "_shard_numel_padded", 0) if tensor.shape == parameter.shape else 0
    return tensor[: tensor.numel() - padding] if padding else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(loaded: Built, expected: Built) -> list[str]:
    """Return the names of this rank's tensors that differ in any bit."""
    found = dict(local_tensors(loaded))
    tensors = dict(local_tensors(expected))
    bad = sorted(found.keys() ^ tensors.keys())
    for name in found.keys() & tensors.keys():
        a, b = found[name], tensors[name]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            bad.append(name)
    return bad
