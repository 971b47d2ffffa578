"""The decoder of ``engines`` in DeepSpeed engines, on CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from engines import Decoder, Form, Job, adamw, lenient_warnings, replicated_form

_ENV = {"DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}

_BF16, _FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
_ANY = {"zero_allow_untested_optimizer": True}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

# By kind: the stage, further options of zero_optimization, and of the configuration.
KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0": (0, {}, _BF16),
    "zero1": (1, {}, _BF16),
    "zero2": (2, {}, _BF16),
    "zero3": (3, {}, _BF16),
    "zero0-fp16": (0, {}, _FP16),
    "zero1-fp16": (1, {}, _FP16),
    "zero2-fp16": (2, {}, _FP16),
    "zero3-fp16": (3, {}, _FP16),
    "zero0-fp32": (0, {}, {}),
    "zero1-fp32": (1, {}, {}),
    "zero3-fp32": (3, {}, {}),
    "zero1-bf16-optimizer": (1, {}, {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "zero1-offload": (1, _OFFLOAD, _BF16),
    "zero2-offload": (2, _OFFLOAD, _FP16),
    "zero3-offload": (3, {**_OFFLOAD, "offload_param": {"device": "cpu"}}, _BF16),
    "zero2-round-robin": (2, {"round_robin_gradients": True}, _BF16),
    "zero3-groups": (3, {"sub_group_size": 200}, _BF16),
}


def initialize(model: torch.nn.Module, optimizer: Any, config: dict[str, Any], **options: Any) -> Any:
    """``deepspeed.initialize`` without its output."""
    prepare()
    with lenient_warnings():
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False, **_ANY, **config}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)[0]


def prepare() -> None:
    """Let this process make an engine on CPUs, without building extensions."""
    os.environ.update(_ENV)
    with lenient_warnings():
        import deepspeed
        import torch._dynamo.config

        torch._dynamo.config.disable = True  # DeepSpeed compiles functions of Muon, which takes minutes
        deepspeed.utils.logger.setLevel(logging.ERROR)
        # The extension is only faster. A killed build leaves a lock behind, on which later runs would wait forever.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        # DeepSpeed refuses fp16 on processors without fast kernels for it; torch has slow ones everywhere.
        get_accelerator = import_module("deepspeed.accelerator").get_accelerator
        get_accelerator().is_fp16_supported = lambda: True
        _forget_earlier_jobs()


def _forget_earlier_jobs() -> None:
    """Let this process meet others that had other jobs, in another process group.

    DeepSpeed keeps a copy of the process group, and compares numbers of modules and parameters between ranks.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)


def deepspeed_job(
    kind: str, seed: int, lr: float = 1e-3, make: Callable[..., Any] = adamw, module: Callable[[int], Any] = Decoder
) -> Job:
    stage, zero, config = KINDS[kind]
    # A persistent parameter is kept complete on every rank at stage 3. The memory-efficient linear function would
    # replace torch's own in this process, for all later jobs.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 9, "memory_efficient_linear": False, **zero}
    with lenient_warnings():
        model = module(seed)
        engine = initialize(model, make(model, lr), {"zero_optimization": zero, **config})
    form = _FORMS.get(type(engine.optimizer).__name__, _plain_form)
    return Job(engine, engine.optimizer, engine.backward, engine.step, lambda: form(engine))


def _names(engine: Any) -> dict[int, str]:
    return {id(param): name for name, param in engine.module.named_parameters()}


def _plain_form(engine: Any) -> Form:
    return replicated_form(dict(engine.module.named_parameters()), engine.optimizer)


def _entries(state: Any, numel: int) -> dict[str, torch.Tensor]:
    return {key: torch.as_tensor(value) for key, value in state.items() if torch.as_tensor(value).numel() in (1, numel)}


def _unfused_form(engine: Any) -> Form:
    names, optimizer = _names(engine), engine.optimizer
    found = {name: param for name, param in engine.module.named_parameters() if not param.requires_grad}
    for params, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups):
        for param, copy in zip(params, copies):
            found |= replicated_form({names[id(param)]: copy}, optimizer.optimizer)
    return found


def _zero_form(engine: Any) -> Form:
    """Concatenate all partitions of a group and cut them by the parameters' sizes."""
    names, optimizer = _names(engine), engine.optimizer
    found = {name: param for name, param in engine.module.named_parameters() if not param.requires_grad}
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    for flat, params in zip(flats, groups):
        ends = list(accumulate(param.numel() for param in params))
        for key, local in {"": flat, **optimizer.optimizer.state.get(flat, {})}.items():
            whole = local if torch.as_tensor(local).ndim == 0 else _concatenated(local)
            for param, end in zip(params, ends):
                name = ".".join(filter(None, (names[id(param)], key)))
                value = torch.as_tensor(whole)
                found[name] = value if not value.ndim else value[end - param.numel() : end].view(param.shape)
    return found


def _zero3_form(engine: Any) -> Form:
    names, optimizer = _names(engine), engine.optimizer
    found = {
        name: _concatenated(param.ds_tensor)[: param.ds_numel].view(param.ds_shape)
        for name, param in engine.module.named_parameters()
        if not param.requires_grad
    }
    for flat, params in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups):
        for key, local in {"": flat, **optimizer.optimizer.state.get(flat, {})}.items():
            start = 0
            for param in params:
                size = param.ds_tensor.ds_numel
                value = torch.as_tensor(local)
                if value.ndim:
                    value = _concatenated(value[start : start + size])[: param.ds_numel].view(param.ds_shape)
                found[".".join(filter(None, (names[id(param)], key)))] = value
                start += size
    return found


def _concatenated(local: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(local, requires_grad=False) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach().contiguous())
    return torch.cat(parts)


def model_form(engine: Any) -> Form:
    """The parameters that compute, in their precision."""
    return {
        name: _concatenated(param.ds_tensor)[: param.ds_numel].view(param.ds_shape)
        if hasattr(param, "ds_tensor")
        else param.detach()
        for name, param in engine.module.named_parameters()
    }


_FORMS: dict[str, Callable[[Any], Form]] = {
    "FP16_UnfusedOptimizer": _unfused_form,
    "DeepSpeedZeroOptimizer": _zero_form,
    "BF16_Optimizer": _zero_form,
    "DeepSpeedZeroOptimizer_Stage3": _zero3_form,
}
