"""GPT-2 with Adam, sharded over ranks: the state for benchmarks of many processes.

The content depends only on a tensor's name and an element's global position, so every layout of every world size can
check what a load restores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.workloads import gpt2

__all__ = ["LAYOUTS", "Layout", "RankState", "build"]

_BYTES_PER_PARAMETER = 12  # fp32 and Adam's two moments
_SCRAMBLED = 0x5A


class _Block(nn.Module):
    """One of the repeated layers, which FSDP shards as a unit."""


@dataclass(frozen=True)
class Layout:
    """A way to shard the model over ``world_size`` ranks."""

    name: str
    title: str
    world_size: int
    wrap: Callable[[nn.Module], nn.Module]


class RankState:
    """This rank's part of model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, total_nbytes: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.sections = {"model": model, "optimizer": optimizer}
        self.total_nbytes = total_nbytes
        self._expected = {name: _digest(tensor) for name, tensor in self._tensors()}

    def scramble(self) -> None:
        """Overwrite every local tensor, so that only a load can restore the content."""
        with torch.no_grad():
            for _, tensor in self._tensors():
                tensor.view(-1).view(torch.uint8).fill_(_SCRAMBLED)

    def difference(self) -> str | None:
        """Return the first local tensor that differs in any bit from its original content, or None."""
        found = {name: _digest(tensor) for name, tensor in self._tensors()}
        names = [*self._expected, *found]
        return next((name for name in names if found.get(name) != self._expected.get(name)), None)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            padding = getattr(parameter, "_shard_numel_padded", 0)  # padding of FSDP-1's flat parameters has no meaning
            yield name, _local(parameter, padding)
            for key, value in sorted(self.optimizer.state[parameter].items()):
                yield f"{name}.{key}", _local(value, padding if value.shape == parameter.shape else 0)


def build(name: str, scale: float) -> RankState:
    """Build the layout on the default process group, with the content that all layouts share."""
    shapes = gpt2(scale)
    model = _module(shapes)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(_content(number, parameter.numel()).view(parameter.shape))
    wrapped = LAYOUTS[name].wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.0, foreach=False)
    for parameter in wrapped.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            # Powers of two are exact in every element, however the tensor is sharded.
            _local(optimizer.state[parameter]["exp_avg"]).copy_(_local(parameter)).mul_(0.5)
            _local(optimizer.state[parameter]["exp_avg_sq"]).copy_(_local(parameter)).mul_(0.25)
    total = sum(torch.Size(shape).numel() for _, shape in shapes) * _BYTES_PER_PARAMETER
    return RankState(wrapped, optimizer, total)


def _module(shapes: list[tuple[str, tuple[int, ...]]]) -> nn.Module:
    root = nn.Module()
    for name, shape in shapes:
        *path, last = name.split(".")
        module = root
        for depth, part in enumerate(path):
            if part not in module._modules:
                module.add_module(part, _Block() if depth and path[depth - 1] == "h" else nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty(shape)))
    return root


def _content(number: int, count: int) -> torch.Tensor:
    """Return ``count`` floats from 1 to 2. Neighbours differ, and so do tensors."""
    mantissa = torch.arange(count, dtype=torch.int64).add_(number * 7919).mul_(2654435761).bitwise_and_(0x7FFFFF)
    return mantissa.bitwise_or_(0x3F800000).to(torch.int32).view(torch.float32)


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, _Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def _fsdp1_flat(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP-1 announces its deprecation
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({_Block}),
            device_id=torch.device("cpu"),
            device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            use_orig_params=False,
        )


def _tensor_parallel(model: nn.Module) -> nn.Module:
    """Shard matrices by rows and by columns in turn; replicate vectors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = 0
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(matrices % 2) if parameter.ndim == 2 else Replicate()
            matrices += parameter.ndim == 2
            distributed = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(distributed))
    return model


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fsdp2-2", "FSDP-2 on 2", 2, _fsdp2),
        Layout("fsdp2-4", "FSDP-2 on 4", 4, _fsdp2),
        Layout("fsdp1-flat-2", "FSDP-1 on 2, flat parameters", 2, _fsdp1_flat),
        Layout("tp-2", "tensor parallel on 2", 2, _tensor_parallel),
    )
}


def _local(tensor: torch.Tensor, padding: int = 0) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor[: tensor.numel() - padding] if padding else tensor


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(memoryview(flat.numpy()))  # type: ignore[arg-type]
