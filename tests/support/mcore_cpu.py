"""Run Megatron-core without CUDA, for tests of formats and resharding.

Inside ``megatron_on_cpu()``, tensors that Megatron creates on CUDA go to the CPU, streams and events do nothing, and
``FusedAdam`` replaces the fused optimizer that Megatron takes from apex or transformer_engine. This shows nothing about
CUDA itself.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

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
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
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
                grad = param.grad.float()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_()
                param.addcdiv_(mean, root.add_(group["eps"]), value=-group["lr"])


# Its place in apex, because checkpoints record the class.
FusedAdam.__module__ = "apex.optimizers.fused_adam"


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
            (optimizers, "Adam", FusedAdam),
            (optimizers, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
            (distrib_optimizer, "USING_TE_OPTIMIZER", False),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch.object(multi_latent_attention, "TELinear", ()))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        random.initialize_rng_tracker(force_reset=True)
        tracker = random.get_cuda_rng_tracker()
        stack.enter_context(mock.patch.object(tracker, "fork", return_value=contextlib.nullcontext()))
        stack.enter_context(_OnCpu())
        yield
