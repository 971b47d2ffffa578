"""The door of the weight push into vLLM's workers: ``--worker-extension-cls
bytecheckpoint.inference.vllm_worker.WorkerExtension``. Needs vLLM.

Weights are put in by vLLM's own layerwise reload, so that whatever a layer makes of its weights (packing,
quantisation) is made again, into the memory that captured graphs know.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import utils as models_utils
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from ..errors import MismatchError, StateError
from .hub_names import hub_tensors
from .push.quantizing import grid_of, scale_name
from .push.receiver import Receiver
from .push.targets import aim_of, refusal
from .vllm_adapters import receivers_of

__all__ = ["VllmModel", "WorkerExtension", "answer", "receiver_of"]

Weights = Iterator[tuple[str, torch.Tensor]]

_log = logging.getLogger(__name__)


class VllmModel:
    """An ``EngineModel``: the model of one worker, and vLLM's ways of making and loading it."""

    def __init__(self, vllm_config: Any, model: nn.Module, runner: Any = None) -> None:
        self._config, self._model, self._runner = vllm_config, model, runner
        self.quantized = vllm_config.model_config.quantization is not None
        self.blocks = _blocks(vllm_config.quant_config)
        self._serves_own = self._served_own = True  # what the engine started with: now, before the last load
        self._ties = _ties(model)
        self._on_hub: set[frozenset[str]] = set()

    def make(self) -> nn.Module:
        _check_replicas(self._config)
        if self._config.parallel_config.enable_eplb:
            raise StateError(
                "this engine moves experts between its workers while it serves (--enable-eplb), and vLLM's loader puts "
                "weights where they were when it started; start it without"
            )
        # Layers enter themselves into lists of the configuration, and those of the model that serves must stay.
        config = copy.copy(self._config)
        config.compilation_config = copy.copy(self._config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        for device in ("meta", "cpu"):
            try:
                with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                    made: nn.Module = initialize_model(vllm_config=config, model_config=config.model_config)
                    self._untie(made)
                    return made
            except (NotImplementedError, RuntimeError):
                if device == "cpu":
                    raise
                # Some models compute with what they make (expert maps): that takes memory, of the size of the weights.
                _log.info("push: the model cannot be made without memory; made with", exc_info=True)
                config.compilation_config.static_forward_context = {}
                config.compilation_config.static_all_moe_layers = []
        raise AssertionError

    def _untie(self, made: nn.Module) -> None:
        """Make of it what a reload's loader finds: tied parameters are apart, and none has memory."""
        # vLLM keeps layers of which one will do for all models (rotary embeddings): those are in use.
        serving = set(self._model.modules())
        for layer in made.modules():
            if layer not in serving:
                restore_layer_on_meta(layer, get_layerwise_info(layer))
                # What another model of this id, which is gone, left to other stages.
                models_utils._model_to_pp_missing_layer_names.pop(id(layer), None)

    def run_loader(self, model: nn.Module, weights: Weights) -> None:
        with set_current_vllm_config(self._config):
            model.load_weights(self._as_loaded(weights))  # type: ignore[operator]

    def _as_loaded(self, weights: Weights) -> Weights:
        """As the loader knows them: under the hub's names, and tied ones too."""
        tensors: Mapping[str, torch.Tensor] = dict(weights)
        names = frozenset(tensors)
        if names not in self._on_hub:
            converted = hub_tensors(self._config.model_config.hf_config, tensors)
            if converted is tensors:
                self._on_hub.add(names)  # asking takes a model of transformers' own
            tensors = converted
        if self.blocks is not None:
            tensors = _with_scales_shaped(tensors, self.blocks)
        return self._with_tied(iter(tensors.items()))

    def _with_tied(self, weights: Weights) -> Weights:
        """A reload makes each tied layer anew from tensors of its own; where one is not among the weights, it is that
        which it is tied to."""
        seen: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in self._ties or name in self._ties.values():
                seen[name] = tensor
            yield name, tensor
        for name, first in self._ties.items():
            if name not in seen and first in seen:
                yield name, seen[first]

    def load(self, weights: Weights) -> None:
        self._served_own = self._serves_own
        self._serves_own = False
        self._reload(self._as_loaded(weights))

    def _reload(self, weights: Weights) -> None:
        with set_current_vllm_config(self._config), torch.no_grad(), _kernels_made_anew(self._model):
            initialize_layerwise_reload(self._model)
            try:
                self._model.load_weights(weights)  # type: ignore[operator]
                finalize_layerwise_reload(self._model, self._config.model_config)
            except BaseException:
                self._give_up()
                raise
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self._runner, reset):
                getattr(self._runner, reset)()

    def _give_up(self) -> None:
        """End a reload in the middle: layers that are not complete get back the tensors that they had."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        LOADING_LAYERS.clear()
        self._model._do_torchao_reload = getattr(self._model, "_original_do_torchao_reload", False)  # type: ignore[assignment]

    def restore(self) -> bool:
        loader = get_model_loader(self._config.load_config)
        if not self._served_own or not hasattr(loader, "get_all_weights"):
            return False
        self._reload(self._with_tied(iter(loader.get_all_weights(self._config.model_config, self._model))))
        self._serves_own = True
        return True


@contextmanager
def _kernels_made_anew(model: nn.Module) -> Iterator[None]:
    """On CPUs, experts are packed where their kernel is made, which a reload leaves out: it would leave them unpacked,
    and the kernel would compute nonsense. Graphs are not captured there, so another kernel does no harm."""
    methods = {id(method): method for layer in model.modules() if (method := getattr(layer, "quant_method", None))}
    kept = [(method, method.moe_kernel) for method in methods.values() if getattr(method, "moe_kernel", None)]
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        kept = []
    for method, _ in kept:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kept:
            if method.moe_kernel is None:  # nothing was loaded there
                method.moe_kernel = kernel


def _check_replicas(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
        raise StateError(
            f"this engine has {parallel.data_parallel_size} data-parallel replicas behind one address, and vLLM "
            "passes on the answers of the first alone; start it with --data-parallel-external-lb, and push to each"
        )


def _blocks(quantization: Any) -> tuple[int, int] | None:
    """Of checkpoints that have ``weight_scale_inv`` for blocks of weights."""
    if not isinstance(quantization, Fp8Config) or not quantization.weight_block_size:
        return None
    rows, columns = quantization.weight_block_size
    return rows, columns


def _with_scales_shaped(tensors: Mapping[str, torch.Tensor], blocks: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Scales in the shape that they have on the hub. Raises ``MismatchError`` for those that are not of their weight's
    blocks: vLLM's loader would repeat one row of them for all."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        scales = tensors.get(scale_name(name))
        if scales is None or tuple(scales.shape) == (grid := grid_of(tensor.shape, blocks)):
            continue
        # Transformers leaves out dimensions of one block where it takes experts apart.
        if [size for size in scales.shape if size > 1] != [size for size in grid if size > 1]:
            raise MismatchError(
                f"{name} of shape {list(tensor.shape)} has scales of shape {list(scales.shape)}, and its blocks of "
                f"{blocks[0]}x{blocks[1]} need {list(grid)}; weights that a model has fused can be quantised as one "
                "only where no block has elements of two of them"
            )
        found[scale_name(name)] = scales.view(grid)
    return found


def _ties(model: nn.Module) -> dict[str, str]:
    """Further names of embeddings' and heads' parameters, and their first, as tensors are called: layers that can have
    LoRA are in others. What else layers share, loaders know by its first name only."""
    first: dict[int, str] = {}
    named = (
        (f"{prefix}.{name}".replace(".base_layer.", "."), one)
        for prefix, layer in model.named_modules()
        if isinstance(layer, VocabParallelEmbedding)
        for name, one in layer.named_parameters(recurse=False)
    )
    return {name: known for name, one in named if (known := first.setdefault(id(one), name)) != name}


_receivers: WeakKeyDictionary[nn.Module, Receiver] = WeakKeyDictionary()


def receiver_of(vllm_config: Any, model: nn.Module, runner: Any = None) -> Receiver:
    """The one receiver of a worker's model, by whichever door it is reached."""
    if model not in _receivers:
        _receivers[model] = Receiver(VllmModel(vllm_config, model, runner))
    return _receivers[model]


def answer(vllm_config: Any, model: nn.Module, text: str, runner: Any = None) -> str:
    """The answer to a sender, of the worker's model or of what is served beside it. Never raises."""
    target, request = aim_of(text)
    if target is None:
        return receiver_of(vllm_config, model, runner).answer(request)
    try:
        _check_replicas(vllm_config)
        if "draft" in target:
            receiver = _receiver_of_draft(vllm_config, runner)
        else:
            receiver = receivers_of(model).receiver(target)
    except StateError as error:
        return refusal(error, request)
    return receiver.answer(request)


def _receiver_of_draft(vllm_config: Any, runner: Any) -> Receiver:
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise StateError("this engine has pipeline stages, of which the last alone has the draft model; not supported")
    drafter = getattr(runner, "drafter", None)
    # Others share layers with the model that serves, which a reload would touch.
    if not isinstance(drafter, DraftModelProposer):
        raise StateError(
            "this engine has no draft model that is one by itself and can be reached: start it with "
            "--speculative-config of the method draft_model, and with the worker extension"
        )
    return receiver_of(drafter._create_draft_vllm_config(), runner.get_draft_model())


class WorkerExtension:
    """Becomes a base of vLLM's worker class, so its names must be none that vLLM uses."""

    def bcp_push(self, request: str) -> str:
        """Answer a sender. Never raises: vLLM would take the other workers' answers for those of its next request."""
        worker: Any = self
        return answer(worker.vllm_config, worker.model_runner.get_model(), request, worker.model_runner)
