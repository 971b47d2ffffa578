"""A real training job in many layouts: forward, loss, backward, and all state that a resume must restore.

The global batch of a step depends only on the data position. Ranks along the data dimension process equal slices, so
the mean of their losses is the same in every layout, up to rounding.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint as bcp

VOCABULARY, LENGTH, BATCH, WIDTH = 13, 6, 8, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 18)  # divisible by 2, but not by 4
        self.down = nn.Linear(18, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        # With tensor parallelism each rank has some of the heads, of 4 features each.
        q, k, v = (t(h).unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    """The full model, or the part of it that a pipeline stage keeps, under the same names."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(index): Block(dropout) for index in range(2)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            if self.training:
                self.tokens_seen += x.numel()
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x).clone()  # FSDP-2 warns about views


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_at(position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch: sequences with a pattern that the model can learn."""
    generator = torch.Generator().manual_seed(1000 + position)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _shard(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for block in model.blocks.values():
        column = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        parallelize_module(block, mesh, {**column, "out": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def _fsdp1(orig: bool) -> Callable[[Transformer], nn.Module]:
    def wrap(model: Transformer) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP-1 is deprecated
            return FSDP(
                model,
                use_orig_params=orig,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
            )

    return wrap


def _mesh(*sizes: int) -> DeviceMesh:
    names = {1: ("dp",), 2: ("dp", "tp")}[len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _stage(model: Transformer) -> nn.Module:
    rank = dist.get_rank()
    del model.blocks[str(1 - rank)]
    if rank == 0:
        model.head = None
    else:
        model.embedding = None
        del model._buffers["tokens_seen"]
    return model


# World size, wrapper, and the number of ranks that share each slice of the data.
LAYOUTS: dict[str, tuple[int, Callable[[Transformer], nn.Module], int]] = {
    "plain": (1, lambda model: model, 1),
    "ddp-2": (2, nn.parallel.DistributedDataParallel, 1),
    "fsdp1-orig-2": (2, _fsdp1(True), 1),
    "fsdp1-flat-2": (2, _fsdp1(False), 1),
    "fsdp2-2": (2, lambda model: _shard(model, _mesh(2)), 1),
    "fsdp2-4": (4, lambda model: _shard(model, _mesh(4)), 1),
    "hsdp-4": (4, lambda model: _shard(model, _mesh(2, 2)), 1),
    "tp-2": (2, lambda model: _parallelize(model, _mesh(2)), 2),
    "fsdp2-tp-4": (4, lambda model: _tp_then_shard(model), 2),
    "pp-2": (2, _stage, 2),
}


def _tp_then_shard(model: Transformer) -> nn.Module:
    mesh = _mesh(2, 2)
    return _shard(_parallelize(model, mesh["tp"]), mesh["dp"])


class Job:
    """One rank's part of a training run. ``seed`` determines initial values and random numbers."""

    def __init__(self, layout: str, *, seed: int, dropout: float, scaler: bool = False, averaged: bool = False) -> None:
        self.world_size, wrap, self.copies = LAYOUTS[layout]
        torch.manual_seed(seed)
        full = Transformer(dropout)
        second = copy.deepcopy(full)
        self.model = wrap(full)
        self.pipeline = _schedule(self.model) if layout.startswith("pp") else None
        # An averaged copy: torch's class if the model can be copied, otherwise a second model of the same layout.
        self.averaged = torch.optim.swa_utils.AveragedModel(second, avg_fn=_decay) if averaged else wrap(second)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm_up, decay], [4])
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=16.0, growth_interval=3)
        self.data = {"position": 0}
        # Ranks draw different random numbers, except ranks of one slice, whose activations are replicas.
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed * 100 + rank // self.copies)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.averaged,
            "rng": bcp.RNGState(),
            "extra_state": self.data,
        }

    def step(self) -> float:
        """Make one step, and return this rank's loss."""
        inputs, targets = (self._slice(part) for part in batch_at(self.data["position"]))
        loss = self._pipeline_step(inputs, targets) if self.pipeline is not None else self._plain_step(inputs, targets)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._average()
        self.data["position"] += 1
        return loss

    def _plain_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        return loss.item()

    def _pipeline_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert self.pipeline is not None
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            self.pipeline.step(inputs)
        else:
            self.pipeline.step(target=targets, losses=losses)
        return sum(loss.item() for loss in losses) / max(len(losses), 1)

    def _average(self) -> None:
        if isinstance(self.averaged, torch.optim.swa_utils.AveragedModel):
            model = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
            self.averaged.update_parameters(model)
            return
        with torch.no_grad():
            for slow, fast in zip(self.averaged.parameters(), self.model.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)

    def _slice(self, part: torch.Tensor) -> torch.Tensor:
        ways = self.world_size // self.copies
        rank = dist.get_rank() // self.copies if dist.is_initialized() else 0
        return part.chunk(ways)[rank] if ways > 1 else part


def _decay(slow: torch.Tensor, fast: torch.Tensor, count: Any) -> torch.Tensor:
    return slow * 0.9 + fast * 0.1


def _schedule(stage: nn.Module) -> ScheduleGPipe:
    rank, half = dist.get_rank(), BATCH // 2
    tokens = torch.zeros(half, LENGTH, dtype=torch.int64)
    hidden, logits = (torch.zeros(half, LENGTH, size, requires_grad=True) for size in (WIDTH, VOCABULARY))
    # The shapes are passed explicitly: inferring them runs a forward pass, which changes buffers.
    shapes = {"input_args": (tokens, hidden)[rank], "output_args": (hidden, logits)[rank]}
    return ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu"), **shapes), n_microbatches=2, loss_fn=loss_of
    )


def fingerprint(job: Job) -> Iterator[tuple[str, Any]]:
    """Return all state of this rank that later steps depend on, comparable with ``==``."""
    for part in ("model", "averaged"):
        for name, tensor in [*getattr(job, part).named_parameters(), *getattr(job, part).named_buffers()]:
            yield f"{part}.{name}", _bits(tensor)
    for index, parameter in enumerate(job.model.parameters()):
        for key, value in job.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{index}.{key}", _bits(value)
    yield "scheduler", repr(job.scheduler.state_dict()["_schedulers"])
    yield "lr", [group["lr"] for group in job.optimizer.param_groups]
    yield "scaler", job.scaler.state_dict()
    yield "rng", torch.get_rng_state().tolist()
    yield "position", job.data["position"]


def _bits(tensor: torch.Tensor) -> list[Any]:
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.tolist()
