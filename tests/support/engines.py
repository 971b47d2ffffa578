"""Small training jobs in several frameworks, whose states can be compared in one form.

Every job trains the same decoder on the same global batches with AdamW. ``full_form`` gathers what a job holds with
torch's own means, without the library: float32 parameters (the master weights where a framework has them), moments and
steps by the names of the decoder. It is the oracle of loads from one framework into another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, BATCH = 19, 8, 6, 12  # 19 rows: uneven over 2, 3 and 4

Form = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)  # 17 rows
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + self.project(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """A decoder with a tied output layer, a frozen parameter (exact in any precision) and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randint(-8, 8, (LENGTH, WIDTH)) / 64, requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight
        self.register_buffer("seed", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    """This rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different weight decay, of the trained parameters."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    vectors = [param for name, param in trained if name.endswith("bias") or "norm" in name]
    matrices = [param for _, param in trained if all(param is not other for other in vectors)]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model), lr=lr)


@dataclass
class Job:
    """A model and its optimizer in one framework. ``backward`` computes gradients, ``update`` makes a step."""

    model: Any
    optimizer: Any
    backward: Callable[[torch.Tensor], None]
    update: Callable[[], None]
    form: Callable[[], Form]
    data: Callable[[int], torch.Tensor] = batch

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: range) -> list[float]:
        """The losses of the global batches."""
        losses = []
        with lenient_warnings():
            for step in steps:
                loss = self.model(self.data(step))
                self.backward(loss)
                self.update()
                mean = loss.detach().float()
                dist.all_reduce(mean)
                losses.append(mean.item() / dist.get_world_size())
        return losses

    def full_form(self) -> Form:
        """Parameters, moments and steps in float32 by name, on every rank."""
        with lenient_warnings(), torch.no_grad():
            return {name: tensor.detach().clone().float() for name, tensor in self.form().items()}


@contextmanager
def lenient_warnings() -> Iterator[None]:
    """The frameworks cause warnings in each other, which are not errors of the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torch_job(kind: str, seed: int, lr: float = 1e-3, make: Callable[[int], Any] = Decoder) -> Job:
    """``ddp``, ``fsdp1`` or ``fsdp2``, in float32."""
    with lenient_warnings():
        model, form = _TORCH[kind](make(seed))
        optimizer = adamw(model, lr)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Job(model, optimizer, lambda loss: loss.backward(), update, lambda: form(model, optimizer))


def _ddp(model: Any) -> tuple[nn.Module, Callable[..., Form]]:
    return nn.parallel.DistributedDataParallel(model), lambda wrapped, optimizer: replicated_form(
        dict(wrapped.module.named_parameters()), optimizer
    )


def _fsdp1(model: Any) -> tuple[nn.Module, Callable[..., Form]]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def clean(name: str) -> str:
        return name.replace("_fsdp_wrapped_module.", "")

    def gathered(wrapped: Any) -> Form:
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return {clean(name): param.detach().clone() for name, param in wrapped.named_parameters()}

    def form(wrapped: Any, optimizer: Any) -> Form:
        found = gathered(wrapped)
        kept = [param.detach().clone() for param in wrapped.parameters()]
        names = [clean(name) for name, param in wrapped.named_parameters() if param.requires_grad]
        for key in ("exp_avg", "exp_avg_sq"):
            # full_optim_state_dict gathers wrong moments of some parameters, so the parameters carry them.
            for param in wrapped.parameters():
                if param.numel() and key in optimizer.state.get(param, {}):
                    param.copy_(optimizer.state[param][key])
            full = gathered(wrapped)
            found.update({f"{name}.{key}": full[name] for name in names})
        for param, old in zip(wrapped.parameters(), kept):
            param.copy_(old)
        steps = {entry["step"].item() for entry in optimizer.state.values()}
        return {**found, **{f"{name}.step": torch.tensor(step) for name in names for step in steps}}

    policy, device = ModuleWrapPolicy({type(block) for block in model.blocks}), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True), form


def _fsdp2(model: Any) -> tuple[nn.Module, Callable[..., Form]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), sharded_form


_TORCH: dict[str, Callable[[Any], tuple[nn.Module, Callable[..., Form]]]] = {
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}
TORCH_KINDS = tuple(_TORCH)


def sharded_form(model: Any, optimizer: Any) -> Form:
    """The form of a job of DTensors. A collective."""

    def full(tensor: Any) -> torch.Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    found: Form = {}
    for name, param in model.named_parameters():
        found[name] = full(param)
        found.update({f"{name}.{key}": full(value) for key, value in optimizer.state.get(param, {}).items()})
    return found


def replicated_form(params: dict[str, torch.Tensor], optimizer: Any) -> Form:
    """The form of a job whose ranks hold everything."""
    found = dict(params)
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


def differences(found: Form, expected: Form) -> list[str]:
    """The names of what differs in any bit."""
    bad = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        if found[name].shape != expected[name].shape or not torch.equal(found[name], expected[name]):
            bad.append(name)
    return sorted(bad)
