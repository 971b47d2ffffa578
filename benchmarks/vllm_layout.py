"""Compute the target layout of any rank of a vLLM engine in one process, without weights, peers or an accelerator.

vLLM builds the model for that rank, with stand-ins for process groups and kernels and with parameters on the meta
device. Its own loader then loads recorded tensors. This must not run in a process in which an engine runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_experts
from vllm.model_executor.layers.fused_moe.oracle import int8 as int8_experts
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import utils as models_utils
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.hub_shapes import StoredTensor, hub_shapes
from benchmarks.target_layout import TargetLayout
from bytecheckpoint.errors import StateError, UsageError
from bytecheckpoint.inference.layouts.hub_names import hub_tensors
from bytecheckpoint.inference.layouts.parts import StridedView
from bytecheckpoint.inference.layouts.recording import Recorder

__all__ = ["EngineRank", "engine_model", "layout_of"]


@dataclass(frozen=True)
class EngineRank:
    """One rank of an engine with ``tp * pp`` ranks, in which the ranks of a pipeline stage are consecutive.

    With ``ep``, each expert is complete on one rank of a stage. ``dtype`` is vLLM's ``--dtype``.
    """

    tp: int = 1
    pp: int = 1
    ep: bool = False
    rank: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1 or not 0 <= self.rank < self.tp * self.pp:
            raise UsageError(f"there is no rank {self.rank} in an engine of tp={self.tp} and pp={self.pp}")


def layout_of(
    model: str | os.PathLike[str],
    at: EngineRank,
    *,
    stored: Sequence[StoredTensor] | None = None,
) -> TargetLayout:
    """The layout of rank ``at`` for the model whose configuration is in the directory ``model``.

    ``stored`` lists name, shape and dtype of each stored tensor if they differ from the model's files on the hub, such
    as a state in transformers' in-memory form. The result does not depend on the kernels that this machine supports.

    Raises ``StateError`` if the configuration cannot be read or the stored tensors cannot be derived from it. Errors
    of vLLM for a model or engine that it does not support pass through.
    """
    tensors = hub_shapes(_configuration(model)) if stored is None else list(stored)
    config = _engine_config(model, at)
    with _built(config, at) as built:
        recorder = Recorder(_no_values)
        recorded: Mapping[str, torch.Tensor] = dict(recorder.tensors(tensors))
        if stored is not None:
            recorded = hub_tensors(config.model_config.hf_config, recorded)
        built.load_weights(recorded.items())  # type: ignore[operator]
        return TargetLayout.from_recording(recorder, tensors, built)


@contextmanager
def engine_model(model: str | os.PathLike[str], at: EngineRank, *, real: bool = False) -> Iterator[nn.Module]:
    """Build the model of rank ``at``. Inside the context, stand-ins answer the model's queries about its peers.

    Parameters are on the meta device unless ``real``.
    """
    with _built(_engine_config(model, at), at, real=real) as built:
        yield built


@contextmanager
def _built(config: Any, at: EngineRank, *, real: bool = False) -> Iterator[nn.Module]:
    # Isolate vLLM's table of layers on other pipeline stages: its keys are ids of models, which Python reuses.
    missing_layers = getattr(models_utils, "_model_to_pp_missing_layer_names", {})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(parallel_state, **_stand_ins(at, config.model_config)))
        stack.enter_context(mock.patch.dict(missing_layers, clear=True))
        # vLLM chooses a kernel when it builds an 8-bit layer and fails if this machine's processor supports none,
        # although the layer's parameters do not depend on the kernel before ``process_weights_after_loading``.
        choose_linear = mock.patch.object(linear_kernels, "choose_scaled_mm_linear_kernel", return_value=_LinearStandIn)
        stack.enter_context(choose_linear)
        for module in (fp8_experts, int8_experts):
            stack.enter_context(mock.patch.object(module, "backend_to_kernel_cls", return_value=[_ExpertsStandIn]))
        stack.enter_context(set_current_vllm_config(config))
        with set_default_torch_dtype(config.model_config.dtype), nullcontext() if real else _MetaParameters():
            built = initialize_model(vllm_config=config)
        yield built


def _engine_config(model: str | os.PathLike[str], at: EngineRank) -> Any:
    return VllmConfig(
        model_config=ModelConfig(model=os.fspath(model), skip_tokenizer_init=True, dtype=at.dtype, enforce_eager=True),
        parallel_config=ParallelConfig(
            tensor_parallel_size=at.tp,
            pipeline_parallel_size=at.pp,
            enable_expert_parallel=at.ep,
            distributed_executor_backend="mp",  # otherwise vLLM requires that many accelerators
        ),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )


class _MetaParameters(TorchFunctionMode):
    """Put new floating-point tensors on the meta device. Integer tensors (expert maps) are real."""

    _filled = frozenset(
        {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided}
    )
    _all = frozenset(_device_constructors())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._filled:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            is_integer = func is torch.full and kwargs.get("dtype") is None and not isinstance(args[-1], float)
            if dtype.is_floating_point and not is_integer:
                kwargs["device"] = "meta"
        elif func in self._all:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def _stand_in(name: str, ranks: Sequence[int], rank: int) -> Any:
    """A vLLM group coordinator for ``rank`` that has no peers."""
    group = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
    members = SimpleNamespace(rank=lambda: ranks.index(rank), size=lambda: len(ranks))
    group.unique_name = f"{name}:stand-in"
    group.rank, group.ranks, group.group_ranks = rank, list(ranks), [list(ranks)]
    group.world_size, group.rank_in_group = members.size(), members.rank()
    group.local_rank = group.device_index = 0
    group.device = torch.device("cpu")
    group.cpu_group = group.device_group = members
    group.device_communicator = group.mq_broadcaster = None
    group.use_device_communicator = group.use_custom_op_call = group.use_cpu_custom_send_recv = False
    return group


def _stand_ins(at: EngineRank, model_config: ModelConfig) -> dict[str, Any]:
    """Stand-ins for the groups of vLLM that an engine would create for this rank, by the name of the variable."""
    if parallel_state.model_parallel_is_initialized():
        raise StateError("an engine runs in this process; compute layouts in another process")
    everyone, stage = range(at.tp * at.pp), at.rank // at.tp
    tensor, alone = range(stage * at.tp, (stage + 1) * at.tp), range(at.rank, at.rank + 1)
    members = {"_WORLD": everyone, "_TP": tensor, "_ETP": tensor, "_PP": everyone[at.rank % at.tp :: at.tp]}
    members |= {"_DP": alone, "_DCP": alone, "_PCP": alone} | ({"_EP": tensor} if model_config.is_moe else {})
    return {"_NODE_COUNT": 1} | {name: _stand_in(name, ranks, at.rank) for name, ranks in members.items()}


class _LinearStandIn:
    """The kernel of an 8-bit linear layer in a model that only loads weights; nothing calls it."""

    def __init__(self, config: Any, layer_param_names: Sequence[str] = ()) -> None:
        self.config, self.layer_param_names = config, layer_param_names


class _ExpertsStandIn(FusedMoEExperts):  # type: ignore[misc]
    """The kernel of 8-bit experts in a model that only loads weights; never instantiated."""

    @staticmethod
    def is_supported_config(*_: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def is_monolithic() -> bool:
        return False


def _no_values(name: str, view: StridedView) -> torch.Tensor:
    # The loader continues with zeros. The recorder notes which values it read; the result is discarded.
    return torch.zeros(view.shape)


def _configuration(model: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(model) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read as a model configuration: {error}") from None
    if not isinstance(found, dict):
        raise StateError(f"{path} is not a model configuration: it contains no mapping")
    return found
