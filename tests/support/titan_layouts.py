"""The layouts of the reshard matrix of a mixture of experts, sharded like torchtitan shards it.

Like ``layouts.py``, this module does not use the library. The model trains with real collectives, so results differ
between layouts in the last bits. ``gathered`` therefore takes the expected values from the saving ranks, with
``full_tensor()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from layouts import Built, fill
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, HIDDEN, VOCAB, LAYERS = 8, 12, 10, 2


class Experts(nn.Module):
    """Grouped weights of shape (experts, out, in). Every expert computes every token, weighted by the router."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.zeros(experts, DIM, HIDDEN))
        self.w3 = nn.Parameter(torch.zeros(experts, HIDDEN, DIM))

    def forward(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        if isinstance(w1, DTensor):
            mesh = w1.device_mesh
            split = [Shard(1) if place.is_shard(0) else Replicate() for place in w1.placements]
            tokens = DTensor.from_local(tokens, mesh, [Replicate()] * mesh.ndim)
            scores = DTensor.from_local(scores, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, split)
        tokens = tokens.unsqueeze(0).expand(w1.shape[0], -1, -1)
        hidden = torch.tanh(torch.bmm(tokens, w1.transpose(1, 2))) * torch.bmm(tokens, w3.transpose(1, 2))
        out = torch.bmm(hidden, w2.transpose(1, 2))
        if isinstance(out, DTensor):
            out = out.redistribute(out.device_mesh, [Shard(0) if p.is_shard(0) else Replicate() for p in w1.placements])
        out = (out * scores.transpose(0, 1).unsqueeze(-1)).sum(0)
        return out.full_tensor().clone() if isinstance(out, DTensor) else out  # FSDP warns of views


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.router = nn.Linear(DIM, experts, bias=False)
        self.experts = Experts(experts)
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        scores = torch.softmax(self.router(x), -1)
        return x + self.experts(x, scores)


class Titan(nn.Module):
    """A model or a pipeline stage of it; modules that the stage lacks are None, and the names stay those of the model.

    Six experts: uneven over expert parallelism by 2 and FSDP by 2.
    """

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block(experts) for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(DIM)
        self.output: nn.Module | None = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def _loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, labels)


@dataclass
class Trained(Built):
    """A model that trains. ``schedule`` runs a pipeline, and ``stages`` is the mesh dimension of its ranks."""

    schedule: Any = None
    stages: DeviceMesh | None = None
    losses: list[float] = field(default_factory=list)

    def train(self, first: int, steps: int) -> list[float]:
        """Train on the batches from ``first`` on. All ranks use the same batches. Return the losses."""
        losses = []
        for number in range(first, first + steps):
            generator = torch.Generator().manual_seed(number)
            tokens, labels = torch.randint(0, VOCAB, (2, 8), generator=generator)
            if self.schedule is None:
                loss = _loss(self.model(tokens), labels)
                loss.backward()
                losses.append(loss.item())
            else:
                losses.append(self._pipeline_step(tokens, labels))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def _pipeline_step(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        assert self.stages is not None
        micro: list[torch.Tensor] = []
        last = self.stages.get_local_rank() == self.stages.size() - 1
        if last:
            self.schedule.step(target=labels, losses=micro)
        else:
            self.schedule.step(tokens)
        loss = torch.stack(micro).mean().detach() if last else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss, group=self.stages.get_group())
        return loss.item()


def _expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split experts over ``ep``, and the weights of every expert over ``etp``, if the mesh has such a dimension."""
    names = mesh.mesh_dim_names or ()
    for block in model.layers.values():
        for name, dim in [("w1", 1), ("w2", 2), ("w3", 1)]:
            placements = [Shard({"ep": 0, "etp": dim}[axis]) for axis in names]
            weight = getattr(block.experts, name).detach()
            setattr(block.experts, name, nn.Parameter(distribute_tensor(weight, mesh, placements)))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for key in model.layers:
        plan |= {f"layers.{key}.up": ColwiseParallel(), f"layers.{key}.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def _shard(model: nn.Module, mesh: DeviceMesh, experts: DeviceMesh | None = None, dim: int | None = None) -> nn.Module:
    """Apply FSDP-2 to the layers, their experts (over another mesh), and the rest. ``dim`` is that of the experts."""
    place = None if dim is None else lambda param: Shard(dim)
    for block in model.layers.values():
        if experts is not None:
            fully_shard(block.experts, mesh=experts, shard_placement_fn=place)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _axes(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _flat(mesh: DeviceMesh, name: str) -> DeviceMesh:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flattened dimensions are experimental
        return mesh._flatten(name)


def _plain(model: nn.Module) -> nn.Module:
    return model


def _ep(dim: int | None) -> Callable[[nn.Module], nn.Module]:
    """Experts over (efsdp, ep): ``(Shard(1), Shard(0))``, or ``(_StridedShard(0), Shard(0))``; the rest over both."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = _axes(efsdp=dist.get_world_size() // 2, ep=2)
        _expert_parallel(model, mesh["ep"])
        return _shard(model, _flat(mesh, "fsdp"), mesh["efsdp"], dim)

    return wrap


def _ep_etp(model: nn.Module) -> nn.Module:
    """Expert parallelism with expert tensor parallelism, which is also the tensor parallelism of the rest."""
    mesh = _axes(efsdp=dist.get_world_size() // 4, ep=2, etp=2)
    _tensor_parallel(model, mesh["etp"])
    _expert_parallel(model, mesh["ep", "etp"])
    return _shard(model, _flat(mesh["efsdp", "ep"], "fsdp"), mesh["efsdp"], 1)


def _etp(dim: int | None) -> Callable[[nn.Module], nn.Module]:
    """Only tensor parallelism of the experts: FSDP on dimension 1 splits what ``Shard(1)`` left of ``w1``."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = _axes(fsdp=2, etp=2)
        _tensor_parallel(model, mesh["etp"])
        _expert_parallel(model, mesh["etp",])
        return _shard(model, mesh["fsdp"], mesh["fsdp"], dim)

    return wrap


def _ep_cp(model: nn.Module) -> nn.Module:
    """Context parallelism: FSDP shards over it, and expert parallelism borrows it."""
    mesh = _axes(efsdp=dist.get_world_size() // 2, dp=1, cp=2)
    _expert_parallel(model, _flat(mesh["dp", "cp"], "ep"))
    return _shard(model, _flat(mesh, "fsdp"), mesh["efsdp"], 1)


def _hsdp_ep_unflattened(model: nn.Module) -> nn.Module:
    """Two views of one world mesh: (replicate, shard) for the rest, (replicate, efsdp, ep) for the experts."""
    world = _axes(world=dist.get_world_size())
    dense = world._unflatten(0, (2, dist.get_world_size() // 2), ("replicate", "fsdp"))
    sparse = world._unflatten(0, (2, dist.get_world_size() // 4, 2), ("replicate", "efsdp", "ep"))
    _expert_parallel(model, sparse["ep"])
    return _shard(model, dense, sparse["replicate", "efsdp"], 1)


def _fsdp_dim_1(model: nn.Module) -> nn.Module:
    """FSDP on dimension 1 of everything that has an even one."""
    size = dist.get_world_size()

    def place(param: nn.Parameter) -> Shard:
        return Shard(1) if param.ndim > 1 and param.shape[1] % size == 0 else Shard(0)

    mesh = _axes(fsdp=size)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def _pp_hsdp(model: nn.Module) -> tuple[nn.Module, Any, DeviceMesh]:
    """A pipeline of two stages, each of them sharded and replicated."""
    size = dist.get_world_size()
    mesh = _axes(pp=2, replicate=2, shard=size // 4)
    stage = mesh["pp"].get_local_rank()
    if stage == 0:
        model.norm = model.output = None
        del model.layers["1"]
    else:
        model.tok_embeddings = None
        del model.layers["0"]
    sharded = _shard(model, mesh["replicate", "shard"])
    wrapped = PipelineStage(sharded, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return sharded, ScheduleGPipe(wrapped, n_microbatches=2, loss_fn=_loss), mesh["pp"]


@dataclass(frozen=True)
class TitanLayout:
    name: str
    world_size: int
    wrap: Callable[[nn.Module], Any]


TITAN_LAYOUTS: dict[str, TitanLayout] = {
    layout.name: layout
    for layout in (
        TitanLayout("plain-1", 1, _plain),
        TitanLayout("fsdp-dim1-2", 2, _fsdp_dim_1),
        TitanLayout("fsdp-dim1-4", 4, _fsdp_dim_1),
        TitanLayout("ep-dim1-4", 4, _ep(1)),
        TitanLayout("ep-strided-4", 4, _ep(None)),
        TitanLayout("ep-2", 2, _ep(1)),
        TitanLayout("ep-etp-4", 4, _ep_etp),
        TitanLayout("etp-4", 4, _etp(None)),
        TitanLayout("etp-strided-4", 4, _etp(1)),
        TitanLayout("ep-cp-4", 4, _ep_cp),
        TitanLayout("hsdp-ep-4", 4, _hsdp_ep_unflattened),
        TitanLayout("pp-hsdp-4", 4, _pp_hsdp),
        TitanLayout("ep-etp-8", 8, _ep_etp),
        TitanLayout("pp-hsdp-8", 8, _pp_hsdp),
    )
}


def build_titan(name: str, seed: int) -> Trained:
    """Build the layout on this process group with the values of ``seed``."""
    # torch would reuse meshes that compare equal, although their process groups were those of an earlier case.
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    model = Titan().double()
    fill(model, seed)
    wrapped = TITAN_LAYOUTS[name].wrap(model)
    wrapped, schedule, stages = wrapped if isinstance(wrapped, tuple) else (wrapped, None, None)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2 * seed, weight_decay=0.1)
    return Trained(wrapped, optimizer, schedule, stages)


def gathered(built: Trained) -> dict[str, torch.Tensor]:
    """All tensors of this rank's modules and optimizer as full tensors on every rank that holds a part of them."""
    tensors = {name: _full(tensor).clone() for name, tensor in _tensors(built)}
    return tensors | {f"lr {at}": torch.tensor(group["lr"]) for at, group in enumerate(built.optimizer.param_groups)}


def _tensors(built: Trained) -> Iterator[tuple[str, torch.Tensor]]:
    for module in built.modules:
        yield from ((f"model.{name}", tensor) for name, tensor in module.named_buffers())
        for name, param in module.named_parameters():
            yield f"model.{name}", param
            for key, value in built.optimizer.state.get(param, {}).items():
                yield f"optimizer.{name}.{key}", value


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
