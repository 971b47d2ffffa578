"""A small byte-level GPT and its data: what ``train_gpt.py`` trains. This module does no checkpointing.

The text is the source of the Python standard library, which every machine has. A batch depends only on the global
step, so the loss curve does not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GPT", "Config", "Corpus", "parallelize"]


@dataclass(frozen=True)
class Config:
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    context: int = 128
    vocab: int = 256


class Attention(nn.Module):
    """Causal self-attention with separate q, k and v, so that tensor parallelism can split them by heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.n_head
        self.q = nn.Linear(config.d_model, config.d_model)
        self.k = nn.Linear(config.d_model, config.d_model)
        self.v = nn.Linear(config.d_model, config.d_model)
        self.o = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1 is the number of heads on this rank: all of them, or a part with tensor parallelism.
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.d_model)
        self.wpe = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.06)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, layout: str, mesh: DeviceMesh | None) -> nn.Module:
    """Distribute the model over ``mesh``; ``layout`` is ``none``, ``ddp``, ``fsdp2`` or ``tp``."""
    if mesh is None or layout == "none":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model, device_mesh=mesh)
    if layout == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan: dict[str, ColwiseParallel | RowwiseParallel] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("q", "k", "v"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan |= {
        "blocks.*.attention.o": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)


class Corpus:
    """The standard library's top-level modules as bytes; every tenth file is held out for validation."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        parts = [path.read_bytes() for path in files]
        self.train = torch.frombuffer(
            bytearray(b"\n".join(p for i, p in enumerate(parts) if i % 10)), dtype=torch.uint8
        )
        self.valid = torch.frombuffer(bytearray(b"\n".join(parts[::10])), dtype=torch.uint8)
        self.fingerprint = hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def batch(self, step: int, size: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the global batch of this step: tokens and the bytes that follow them."""
        return self._draw(self.train, torch.Generator().manual_seed(seed * 1_000_003 + step), size, context)

    def validation(self, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the held-out batch, always the same."""
        return self._draw(self.valid, torch.Generator().manual_seed(0), size, context)

    @staticmethod
    def _draw(
        text: torch.Tensor, generator: torch.Generator, size: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]
