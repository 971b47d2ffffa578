"""Run Megatron-core without CUDA, for tests of formats and resharding.

Inside ``megatron_on_cpu()``, tensors that Megatron creates on CUDA go to the CPU, streams and events do nothing, and
``FusedAdam`` replaces the fused optimizer that Megatron takes from apex or transformer_engine. This shows nothing about
CUDA itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from bytecheckpoint.runtime import modes

_CPU = torch.device("cpu")


class FusedAdam(torch.optim.Optimizer):
    """AdamW as apex implements it: the step count is in the group, and the moments are the only state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        assert bias_correction
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                held, grad = _local(param), _local(param.grad).float()
                first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
                held.mul_(1 - group["lr"] * group["weight_decay"])
                first.lerp_(grad, 1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                held.addcdiv_(first / (1 - beta1 ** group["step"]), root, value=-group["lr"])


def _local(tensor: Any) -> Any:
    """What a DTensor of Megatron-FSDP has on this rank: the fused optimizers step this memory."""
    return getattr(tensor, "_local_tensor", tensor)


# Its place in apex, because checkpoints record the class.
FusedAdam.__module__ = "apex.optimizers.fused_adam"


class ScaledAdam(FusedAdam):
    """FusedAdam with the interface of Transformer Engine's: it holds the master weights, and scales the moments."""

    def __init__(
        self,
        params: Any,
        *,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weights: bool,
        use_decoupled_grad: bool,
        master_weight_dtype: torch.dtype,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.dtypes = {key: {torch.uint8: torch.float8_e4m3fn}.get(dtype, dtype) for key, dtype in dtypes.items()}
        self.store_param_remainders = store_param_remainders
        self.scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.copies = 0  # handed out

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for key in self.dtypes:
            if key == "master_param" and store_param_remainders:
                self.state[param][key] = torch.zeros_like(param, dtype=torch.int16)
            else:
                self.set_scaled_state(param, key, param.detach().float() * (key == "master_param"))

    def get_unscaled_state(self, param: torch.Tensor, key: str) -> torch.Tensor:
        value = self.state[param][key]
        if value.dtype in (torch.float32, torch.int16):
            return value
        self.copies += 1
        return value.float() * self.scales[param][key]

    def set_scaled_state(self, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
        if self._has_remainders(param) and key == "master_param":
            assert values.dtype == torch.int16
        else:
            assert values.dtype == torch.float32
            if self.dtypes[key] != torch.float32:
                # A power of two, so that scaling again loses nothing. Values are overwritten, as there.
                scale = torch.exp2(torch.ceil(torch.log2(values.abs().max().clamp(min=1e-30))))
                self.scales.setdefault(param, {})[key] = scale
                values = values.div_(scale).to(self.dtypes[key])
        self.state[param][key] = values.clone()

    def _has_remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def fp32(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """The values with which a step computes."""
        values = self.get_unscaled_state(param, key)
        if values.dtype != torch.int16:
            return values.clone()
        low = values.numpy()
        high = param.detach().view(torch.int16).numpy() - (low < 0)  # what rounding added
        bits = (high.astype(np.uint16).astype(np.uint32) << 16) | low.astype(np.uint16)
        return torch.from_numpy(bits.view(np.float32))

    def _store_master(self, param: torch.Tensor, master: torch.Tensor) -> None:
        if not self._has_remainders(param):
            param.copy_(master)
            self.set_scaled_state(param, "master_param", master)
            return
        bits = master.numpy().view(np.uint32)
        low = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        high = ((bits >> 16) + (low < 0)).astype(np.uint16).view(np.int16)
        param.copy_(torch.from_numpy(high).view(torch.bfloat16))
        self.set_scaled_state(param, "master_param", torch.from_numpy(low))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        plain = FusedAdam([torch.zeros(1)])
        plain.param_groups = []
        held = []
        for group in self.param_groups:
            plain.param_groups.append({**group, "params": []})
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainders(param))
                state = {key: self.fp32(param, key) for key in self.dtypes}
                master = state.pop("master_param")
                master.grad = param.decoupled_grad.float()
                plain.state[master] = state
                plain.param_groups[-1]["params"].append(master)
                held.append((param, master))
        plain.step()
        for group, stepped in zip(self.param_groups, plain.param_groups):
            group.update({key: value for key, value in stepped.items() if key == "step"})
        for param, master in held:
            for key, value in plain.state[master].items():
                self.set_scaled_state(param, key, value)
            self._store_master(param, master.detach())


ScaledAdam.__module__, ScaledAdam.__qualname__ = "transformer_engine.pytorch.optimizers", "FusedAdam"


@contextlib.contextmanager
def scaled_adam() -> Iterator[None]:
    """Let Megatron find a precision-aware optimizer where it looks for that of Transformer Engine."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import optimizer_config

    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = ScaledAdam
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.object(optimizers, "Adam", ScaledAdam))
        for module in (optimizers, optimizer_config):
            stack.enter_context(mock.patch.object(module, "is_te_min_version", return_value=True))
        yield


def _shared_groups() -> Callable[..., Any]:
    """Makes one process group of the same ranks. Megatron makes 53, whose threads of gloo poll while they live.

    Those that Megatron requests of gloo are others, because it destroys one of them.
    """
    make = torch.distributed.new_group
    groups: dict[Any, Any] = {}

    def group(ranks: list[int], *, backend: str | None = None, **options: Any) -> Any:
        key = tuple(ranks), backend
        if key not in groups:
            groups[key] = make(ranks, backend=backend, **options)
        return groups[key]

    return group


_ON_HOST = "_is_on_host"
_KEEP_PLACE = {torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.Tensor.pin_memory}


class _TwoPlaces(TorchFunctionMode):
    """Tensors claim to be on CUDA, except those that ``cpu()`` copied to the host."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return not hasattr(args[0], _ON_HOST)
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = args[0].clone() if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu or (func in _KEEP_PLACE and hasattr(args[0], _ON_HOST)):
            setattr(result, _ON_HOST, True)
        return result


@contextlib.contextmanager
def two_places() -> Iterator[None]:
    """Let Megatron offload the tensors of optimizers from a device, which is the CPU as well."""
    from megatron.core.optimizer import optimizer_config

    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", unpinned))
        stack.enter_context(mock.patch.object(optimizer_config, "is_te_min_version", return_value=False))
        stack.enter_context(_TwoPlaces())
        yield


class _OnCpu(TorchFunctionMode):
    """Replaces CUDA devices in arguments, and lets ``Tensor.type()`` claim CUDA, which Megatron compares."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(map(_on_cpu, args))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.type:
            if len(args) == 1:
                return func(*args).replace("torch.", "torch.cuda.")
            if isinstance(args[1], str):
                return func(args[0], args[1].replace("torch.cuda.", "torch."), *args[2:], **kwargs)
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return _CPU if is_device and str(value).startswith("cuda") else value


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Make Megatron-core usable on this machine while the context is active."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron, and what it imports, warn of much that tests cannot change
        with _patched():
            yield


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    with mock.patch.object(torch, "compile", lambda function: function):  # compiling would take longer than the tests
        importlib.import_module("megatron.core.models.gpt")
    import megatron.core.optimizer as optimizers
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    nothing = mock.MagicMock()
    with contextlib.ExitStack() as stack:
        for name, replacement in {
            "Stream": nothing,
            "Event": nothing,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": nothing,
            "current_device": lambda: _CPU,
            "synchronize": nothing,
            "FloatTensor": lambda values: torch.tensor(values, dtype=torch.float32),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for module, name, replacement in (
            # The mode stands for a device, which no mode of the caller does.
            (modes, "_len_torch_function_stack", lambda: 0),
            (torch.distributed, "new_group", _shared_groups()),
            (optimizers, "Adam", FusedAdam),
            (optimizers, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
            (distrib_optimizer, "USING_TE_OPTIMIZER", False),
            # Without Transformer Engine, each context parallel rank computes the whole sequence.
            (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", lambda emb, dim, cp: emb),
            (mcore_fsdp_adapter, "TELinear", type(None)),
            (mcore_fsdp_adapter, "_get_rng_state_dict", dict),
            (mcore_fsdp_adapter, "_load_rng_state_dict", lambda state: None),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch.object(multi_latent_attention, "TELinear", ()))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        random.initialize_rng_tracker(force_reset=True)
        tracker = random.get_cuda_rng_tracker()
        stack.enter_context(mock.patch.object(tracker, "fork", return_value=contextlib.nullcontext()))
        stack.enter_context(_OnCpu())
        yield
