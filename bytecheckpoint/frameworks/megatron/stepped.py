"""Find the tensors that the optimizers of Megatron-core step, and the ranges of parameters that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ...errors import StateError
from ..base import Context
from ..optimizer_wrappers import as_list
from .fsdp import stepped_range
from .shards import is_a

_MODULE = "megatron.core.optimizer"

SCALED = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""The option with which an optimizer steps the model's parameters, and holds their master weights itself."""


def is_optimizer(obj: object) -> bool:
    """Whether this is an optimizer of Megatron-core, or a chain of them."""
    return is_a(obj, f"{_MODULE}.optimizer.MegatronOptimizer")


@dataclass(eq=False)
class Stepped:
    """A tensor that an inner optimizer steps: the elements of ``span`` of the model's parameter, or all of them.

    With ``is_copy``, it is separate memory, although it may have the dtype of the parameter.
    """

    model_param: torch.Tensor
    tensor: torch.Tensor
    span: tuple[int, int] | None = None
    is_copy: bool = False


def inner_optimizers(leaf: Any) -> list[Any]:
    """The optimizers that step tensors of a leaf: several if some of them step copies in host memory."""
    inner = leaf.optimizer
    return list(inner.sub_optimizers) if _is_offloaded(inner) else [inner]


def update_offloaded(leaf: Any) -> None:
    """Give an optimizer that steps copies in host memory what was loaded into the optimizers inside it."""
    outer = leaf.optimizer
    if not _is_offloaded(outer):
        return
    groups = {
        id(param): group for inner in outer.sub_optimizers for group in inner.param_groups for param in group["params"]
    }
    for group in outer.param_groups:
        for param in group["params"][:1]:
            loaded = groups[id(outer.param_to_inner_param[param])]
            group.update({key: value for key, value in loaded.items() if key in group and key != "params"})
    outer._sync_sub_optimizers_state_to_hdo()


def _is_offloaded(optimizer: Any) -> bool:
    return is_a(optimizer, f"{_MODULE}.cpu_offloading.HybridDeviceOptimizer")


def leaves(optimizer: Any, *, layer_wise: bool = False) -> Iterator[tuple[Any, bool]]:
    """The optimizers in a chain that step parameters, and whether each rank steps only some of the parameters."""
    if is_a(optimizer, f"{_MODULE}.optimizer.ChainedOptimizer"):
        layer_wise = layer_wise or is_a(optimizer, f"{_MODULE}.layer_wise_optimizer.LayerWiseDistributedOptimizer")
        for part in optimizer.chained_optimizers:
            yield from leaves(part, layer_wise=layer_wise)
    elif optimizer.optimizer is not None:
        yield optimizer, layer_wise


def stepped(leaf: Any, context: Context) -> Iterator[Stepped]:
    """What the inner optimizers step. Raises ``StateError`` for an optimizer that is not supported."""
    found = _outer(leaf, context)
    if not _is_offloaded(leaf.optimizer):
        yield from found
        return
    for item in found:
        copy = leaf.optimizer.param_to_inner_param[item.tensor]
        yield Stepped(item.model_param, copy, item.span, is_copy=copy is not item.tensor)


def _outer(leaf: Any, context: Context) -> Iterator[Stepped]:
    kind = f"section {context.section!r}: {type(leaf).__name__} with {type(leaf.optimizer).__name__}"
    if is_a(leaf, f"{_MODULE}.distrib_optimizer.DistributedOptimizer"):
        if not hasattr(leaf, "gbuf_ranges"):  # Megatron-FSDP
            for options in leaf.optimizer.param_groups:
                for param in options["params"]:
                    yield Stepped(param.orig_param, param, stepped_range(kind, leaf.model_chunks, param))
            return
        scaled = config_of(leaf, SCALED)
        low = leaf.shard_float16_groups if scaled else leaf.shard_fp32_from_float16_groups
        pairs = ((leaf.model_float16_groups, low), (leaf.model_fp32_groups, leaf.shard_fp32_groups))
        for models, shards in pairs:
            for model_group, shard_group in zip(models, shards, strict=True):
                for model_param, shard in zip(model_group, shard_group, strict=True):
                    buffer, dtype, bucket = leaf.model_param_gbuf_map[model_param]
                    span = leaf.gbuf_ranges[buffer][dtype][bucket]["param_map"][model_param]["param"]
                    yield Stepped(model_param, shard, (span.start, span.end))
    elif is_a(leaf, f"{_MODULE}.optimizer.Float16OptimizerWithFloat16Params"):
        for model_group, main_group in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            for model_param, main in zip(model_group, main_group, strict=True):
                yield Stepped(model_param, main)
        for group in leaf.fp32_from_fp32_groups:
            for param in group:
                yield Stepped(param, param)
    elif is_a(leaf, f"{_MODULE}.optimizer.FP32Optimizer"):
        for options in leaf.optimizer.param_groups:
            for param in options["params"]:
                yield Stepped(param, param)
    else:
        raise StateError(f"{kind} is not supported; save what its state_dict() returns as a section of PerRank values")


def stepped_by_any_rank(optimizer: Any) -> Iterator[torch.Tensor]:
    """This rank's parameters of the models that data-parallel ranks divide among themselves."""
    if is_a(optimizer, f"{_MODULE}.layer_wise_optimizer.LayerWiseDistributedOptimizer"):
        for ranks in (optimizer.dp_cp_params_list, optimizer.expt_dp_params_list):
            yield from chain.from_iterable(ranks or ())
    for leaf, _ in leaves(optimizer):
        for buffer in getattr(leaf, "buffers", ()):
            yield from chain.from_iterable(bucket.params_list for bucket in buffer.buckets)


def config_of(leaf: Any, name: str) -> Any:
    return getattr(leaf.config, name, None)


def grad_scalers(obj: Any) -> list[Any]:
    """The dynamic loss scalers, which are equal: all of them see every overflow."""
    scalers = [getattr(leaf, "grad_scaler", None) for item in as_list(obj) for leaf, _ in leaves(item)]
    return [scaler for scaler in scalers if scaler is not None and scaler.state_dict()]


def plain_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
