"""Modules of Megatron-core that describe unusual shards, on one rank. Import this inside ``megatron_on_cpu()``."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn


class Described(MegatronModule):
    """A module with parameters of the given shapes, whose shards ``describe`` returns."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], describe: Callable[[Described], dict[str, Any]]) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
        for number, (name, shape) in enumerate(shapes.items()):
            values = torch.arange(torch.Size(shape).numel()).float().view(shape) + 100 * number
            self.register_parameter(name, nn.Parameter(values))
        self.extra: dict[str, Any] = {}
        self._describe = describe

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self._describe(self)

    def set_extra_state(self, state: Any) -> None:
        self.extra["set"] = state

    def get_extra_state(self) -> Any:
        return self.extra["get"]


def whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def experts_copied(module: Described) -> dict[str, Any]:
    """Two experts in one parameter, transposed and copied by the factory, as in Megatron's legacy grouped experts."""

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        stacked = tensor.view(2, 3, 4).transpose(-1, -2)
        halves = torch.chunk(stacked, 2, -2)
        return {
            half: [whole(f"experts.{n}.weight_{half}", expert.contiguous()) for n, expert in enumerate(part)]
            for half, part in zip("wv", halves)
        }

    return {"weight": ShardedTensorFactory("experts.weight", module.weight, build, torch.cat)}


def shuffled(module: Described) -> dict[str, Any]:
    """A factory that rearranges elements."""

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return [whole(key, tensor.flatten()[torch.tensor([2, 0, 1, 3])].view(2, 2))]

    return {"weight": ShardedTensorFactory("weight", module.weight, build, torch.cat)}


def copied(module: Described) -> dict[str, Any]:
    return {"weight": whole("weight", module.weight.detach().clone())}


def incomplete(module: Described) -> dict[str, Any]:
    return {"weight": whole("weight", module.weight)}


def unknown_axis(module: Described) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets("heads.weight", module.weight, (0, 1, 3), prepend_axis_num=1)}


def unknown_object(module: Described) -> dict[str, Any]:
    return {"weight": whole("weight", module.weight), "settings": ShardedObject("settings", {"a": 1}, (1,), (0,))}


def with_extra_state(module: Described) -> dict[str, Any]:
    state = module.get_extra_state()
    offsets = {"global_shape": (4,), "global_offset": (2,)}
    return {
        "weight": whole("decoder.layers.2.weight", module.weight),
        "_extra_state": ShardedObject("decoder.layers.mlp._extra_state", state, **offsets),
    }


class Quantized(torch.Tensor):
    """A tensor of int8 codes and a scale that computes in bf16, as the fp8 tensors of Transformer Engine do."""

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["codes"], self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_((args[1].float() / args[0].scale).round())
            return args[0]
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].codes, args[0].scale)
        raise NotImplementedError(func)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scale).bfloat16()


def quantized(codes: list[list[int]]) -> Described:
    """A module with a quantized weight."""
    module = Described({}, lambda module: {"weight": whole("weight", module.weight)})
    weight = Quantized(torch.tensor(codes, dtype=torch.int8), 0.5)
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    return module


EXTRA = {"tensor": torch.arange(5, dtype=torch.uint8), "stream": io.BytesIO(b"state"), "plain": {"scale": 0.5}}
