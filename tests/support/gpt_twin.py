"""A GPT of torch modules that computes what the one of ``mcore_training`` does, with the names that Megatron stores.

It is a mixture of experts, and every module reads only its own parameters, so that any framework can shard it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

VOCABULARY, WIDTH, HIDDEN, LAYERS, EXPERTS = 60, 16, 24, 4, 4
HEADS, GROUPS, HEAD = 4, 2, 4  # the number of heads, of query groups, and the size of a head


class _Enter(torch.autograd.Function):
    """Where ranks begin to compute different parts of the same: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum of the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _enter(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if group is None else _Enter.apply(x, group)


def _leave(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x if group is None else _Leave.apply(x, group)


def _own(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return _own(weight.redistribute(placements=[Replicate()])) if isinstance(weight, DTensor) else weight


class Norm(nn.Module):
    """A layer norm whose parameters have the names of Transformer Engine, which fuses it with what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(WIDTH))
        self.layer_norm_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), self.layer_norm_weight, self.layer_norm_bias)


class NormLinear(Norm):
    tp: Any = None

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(rows, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(_enter(super().forward(x), self.tp), _own(self.weight))


class RowLinear(nn.Linear):
    tp: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _leave(functional.linear(x, _own(self.weight)), self.tp)


class WholeLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, _whole(self.weight))


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, _whole(self.weight))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = NormLinear((HEADS + 2 * GROUPS) * HEAD)
        self.linear_proj = RowLinear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.linear_qkv(x).unflatten(-1, (-1, HEADS // GROUPS + 2, HEAD)).permute(0, 2, 3, 1, 4)
        query, key, value = mixed[:, :, :-2], mixed[:, :, -2:-1], mixed[:, :, -1:]
        found = functional.scaled_dot_product_attention(
            _rotated(query), _rotated(key).expand_as(query), value.expand_as(query), is_causal=True
        )
        return self.linear_proj(found.permute(0, 3, 1, 2, 4).flatten(2))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of the last dimension by those of the one before."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(x.shape[-2]), speeds).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = WholeLinear(WIDTH, 2 * HIDDEN, bias=False)
        self.linear_fc2 = WholeLinear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(functional.silu(gate) * up * scale)


class Experts(nn.Module):
    """All experts, or those of one rank of an expert parallel group."""

    ep: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(number): Expert() for number in range(EXPERTS)})

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        x, scores = _enter(x, self.ep), _enter(scores, self.ep)
        parts = [expert(x, scores[..., int(number), None]) for number, expert in self.experts.items()]
        return _leave(torch.stack(parts).sum(0), self.ep)


class Mixture(nn.Module):
    """Every expert computes every token, so that all parameters have gradients; Megatron skips those with score 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = Norm()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_fc1(x)
        return self.experts(x, self.router(x).softmax(-1, torch.float32).to(x.dtype))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.mlp = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(x)
        return x + self.mlp(x)


class Gpt(nn.Module):
    """The loss of a batch of tokens. ``stage`` takes half of the layers; its parameters keep the names of the model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.ModuleDict({"word_embeddings": Embedding(VOCABULARY, WIDTH)})
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.decoder.final_layernorm = nn.LayerNorm(WIDTH)
        self.output_layer: nn.Module | None = WholeLinear(WIDTH, VOCABULARY, bias=False)
        self.is_first = True
        nn.init.normal_(self.embedding["word_embeddings"].weight, std=0.02)
        self.output_layer.weight = self.embedding["word_embeddings"].weight

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.decoder.layers.values())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss(self.hidden(tokens[:, :-1]), tokens[:, 1:])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """The logits, or what the next stage takes."""
        x = self.embedding["word_embeddings"](x) if self.is_first else x
        for block in self.blocks:
            x = block(x)
        return x if self.output_layer is None else self.output_layer(self.decoder.final_layernorm(x))

    def stage(self, number: int) -> Gpt:
        """Reduce this model to the first or second half. Both hold the tied embedding, as in Megatron."""
        for key in list(self.decoder.layers)[:: 1 if number else -1][: LAYERS // 2]:
            del self.decoder.layers[key]
        self.is_first = number == 0
        if self.is_first:
            self.output_layer = None
            del self.decoder.final_layernorm
        self.forward = self.hidden
        return self

    def split_tensors(self, mesh: Any) -> None:
        """Tensor parallelism: heads are computed in parallel, the rest is only stored so."""
        weights: dict[nn.Module, int] = {self.embedding["word_embeddings"]: 0}
        for block in self.blocks:
            weights |= {block.self_attention.linear_qkv: 0, block.self_attention.linear_proj: 1}
            for expert in block.mlp.experts.experts.values():
                weights |= {expert.linear_fc1: 0, expert.linear_fc2: 1}
        for module, dim in weights.items():
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))
            module.tp = mesh.get_group()
        self.output_layer.weight = self.embedding["word_embeddings"].weight

    def split_experts(self, mesh: Any) -> None:
        """Expert parallelism: this rank keeps its experts."""
        for block in self.blocks:
            block.mlp.experts.ep = mesh.get_group()
            for number in range(EXPERTS):
                if number * mesh.size() // EXPERTS != mesh.get_local_rank():
                    del block.mlp.experts.experts[str(number)]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
