"""The model of a vLLM worker, for pushes. Needs vLLM.

Weights are applied by vLLM's own layerwise reload, which repeats what a layer does with its weights (packing,
quantization) and writes the result into the memory that captured graphs use.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _layerwise_process,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import utils as models_utils
from vllm.utils.torch_utils import set_default_torch_dtype

from ...errors import MismatchError, StateError
from ..layouts.hub_names import hub_tensors, scale_name
from ..push.block_quantization import grid_of
from ..push.engine_model import EngineModel
from ..push.receiver import Receiver
from ..push.replay import Replay
from ..push.transports.cuda_ipc import compute_device
from .private import keep_adapters

Weights = Iterator[tuple[str, torch.Tensor]]

_log = logging.getLogger(__name__)


class VllmModel(EngineModel):
    """An ``EngineModel`` for the model of one worker; builds and loads it with vLLM's own functions."""

    def __init__(self, vllm_config: Any, model: nn.Module) -> None:
        self._config, self.module = vllm_config, model
        self.runner: Any = None  # whose states belong to the weights; None where it is not known
        self.quantized = vllm_config.model_config.quantization is not None
        self.blocks = blocks_of(vllm_config.quant_config)
        # Whether the engine serves the weights that it started with: now, and before the last load.
        self._serves_own = self._served_own = True
        self.start_version = vars(model).get("bytecheckpoint_version")  # if the loader of this library loaded it
        self.is_starting = False  # while vLLM loads the model, before it processes weights
        self._last_load: Any = None
        self._ties = _ties(model)

    def make(self) -> nn.Module:
        if self._config.parallel_config.enable_eplb:
            raise StateError(
                "this engine moves experts between its workers while it serves (--enable-eplb), and vLLM's loader puts "
                "weights where they were when it started; start it without"
            )
        # Layers register themselves in the configuration; the registrations of the serving model must stay.
        config = copy.copy(self._config)
        config.compilation_config = copy.copy(self._config.compilation_config)
        for device in ("meta", "cpu"):
            config.compilation_config.static_forward_context = {}
            config.compilation_config.static_all_moe_layers = []
            try:
                with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                    made: nn.Module = initialize_model(vllm_config=config, model_config=config.model_config)
                    self._untie(made)
                    return made
            except (NotImplementedError, RuntimeError):
                if device == "cpu":
                    raise
                # Some models compute with new tensors (expert maps), which needs as much memory as the weights.
                _log.info("push: the model cannot be built on the meta device, so it gets memory", exc_info=True)
        raise AssertionError

    def _untie(self, made: nn.Module) -> None:
        """Bring the model into the state in which a reload loads it: untied parameters on the meta device."""
        # vLLM shares some layers among models (rotary embeddings); those of the serving model are in use.
        serving = set(self.module.modules())
        for layer in made.modules():
            if layer not in serving:
                restore_layer_on_meta(layer, get_layerwise_info(layer))
                # Entries of a deleted model whose id Python has reused.
                models_utils._model_to_pp_missing_layer_names.pop(id(layer), None)

    def run_loader(self, model: nn.Module, weights: Weights) -> None:
        with set_current_vllm_config(self._config):
            model.load_weights(self._as_loaded(weights))  # type: ignore[operator]

    def _as_loaded(self, weights: Weights) -> Weights:
        """``weights`` as the loader expects them: under the hub's names, including tied ones."""
        tensors = hub_tensors(self._config.model_config.hf_config, dict(weights))
        if self.blocks is not None:
            tensors = _with_scales_shaped(tensors, self.blocks)
        return self._with_tied(iter(tensors.items()))

    def _with_tied(self, weights: Weights) -> Weights:
        """``weights`` with, for each tied name, the tensor that it is tied to; as vLLM's own loaders, without a tensor
        that is stored under this name.

        A reload loads each tied layer separately.
        """
        seen: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in self._ties.values():
                seen[name] = tensor
            if name not in self._ties:
                yield name, tensor
        for name, first in self._ties.items():
            if first in seen:
                yield name, seen[first]

    def load(self, weights: Weights) -> None:
        if self.is_starting:
            self.run_loader(self.module, weights)
            self._note_load()
        else:
            self._reload(self._as_loaded(weights))

    def can_replay(self, name: str, layer: nn.Module) -> bool:
        serving = _layers_of(self.module).get(name)
        if serving is None or is_deferred_attention_layer(layer):
            return False
        parameters, buffers = get_layerwise_info(serving).restore_metadata
        restored = get_layer_tensors(serving) | parameters | buffers
        return all(
            key in restored and (one.shape, one.stride()) == (restored[key].shape, restored[key].stride())
            for key, one in get_layer_tensors(layer).items()
        )

    def replay(self, replay: Replay, memory: torch.Tensor, weights: Weights) -> None:
        if self.is_starting:
            self.load(weights)
            return
        others: Weights = iter(())
        if replay.others:
            names = {"", *replay.others}  # without a name, it was computed of recorded tensors
            others = (one for one in self._as_loaded(weights) if getattr(one[1], "fqn", "") in names)
        self._reload(others, lambda: self._fill(replay, memory))

    def _fill(self, replay: Replay, memory: torch.Tensor) -> None:
        """Fill layers, and do with each what a reload does once it has loaded a layer."""
        layers = _layers_of(self.module)
        for name in replay:
            info = get_layerwise_info(layers[name])
            materialize_layer(layers[name], info)
            replay.fill(name, get_layer_tensors(layers[name]), memory)
            _layerwise_process(layers[name], info)

    def _reload(self, weights: Weights, fill: Callable[[], None] = lambda: None) -> None:
        with set_current_vllm_config(self._config), torch.no_grad(), _rebuilt_kernels(self.module):
            initialize_layerwise_reload(self.module)
            try:
                fill()
                self.module.load_weights(weights)  # type: ignore[operator]
                finalize_layerwise_reload(self.module, self._config.model_config)
            except BaseException:
                self._give_up()
                raise
            finally:
                self._note_load()
        keep_adapters(self.module)
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.runner, reset):
                getattr(self.runner, reset)()

    def _note_load(self) -> None:
        self._served_own, self._serves_own = self._serves_own, False
        # Each reload of the model, also vLLM's own, replaces this list.
        self._last_load = get_layerwise_info(self.module).loaded_weights

    def was_replaced(self) -> bool:
        return self._last_load is not None and get_layerwise_info(self.module).loaded_weights is not self._last_load

    def _give_up(self) -> None:
        """Abort a reload: incomplete layers get their previous tensors back."""
        for layer in self.module.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        LOADING_LAYERS.clear()
        self.module._do_torchao_reload = getattr(self.module, "_original_do_torchao_reload", False)  # type: ignore[assignment]

    def restore(self) -> bool:
        loader = get_model_loader(self._config.load_config)
        if not self._served_own or not hasattr(loader, "get_all_weights"):
            return False
        self._serves_own = True  # also before this load: after a failure, it can be tried again
        self._reload(self._with_tied(iter(loader.get_all_weights(self._config.model_config, self.module))))
        self._serves_own = True
        return True

    def asleep(self) -> Collection[str]:
        # Only an engine that can sleep has imported it, and vLLM's workers for CPUs only pretend to.
        allocator = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
        if allocator is None or allocator.instance is None:
            return ()
        held = allocator.instance.pointer_to_data.values()
        return {"weights", "kv_cache"} & {one.tag for one in held if getattr(one, "is_asleep", False)}

    def clear_caches(self) -> None:
        for layer in self._config.compilation_config.static_forward_context.values():
            held = getattr(layer, "kv_cache", ())
            for cache in [held] if isinstance(held, torch.Tensor) else held:
                cache.zero_()


@contextmanager
def _rebuilt_kernels(model: nn.Module) -> Iterator[None]:
    """Make a reload on CPUs rebuild the kernels of experts.

    There, vLLM packs experts when it builds their kernel. A reload keeps the kernel and would leave the experts
    unpacked, so that the results would be wrong. A new kernel is safe, as CPUs capture no graphs.
    """
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


def blocks_of(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns of a block if the model's checkpoints have ``weight_scale_inv``, else None."""
    if not isinstance(quantization, Fp8Config) or not quantization.weight_block_size:
        return None
    rows, columns = quantization.weight_block_size
    return rows, columns


def _with_scales_shaped(tensors: Mapping[str, torch.Tensor], blocks: tuple[int, int]) -> dict[str, torch.Tensor]:
    """``tensors`` with scales in the shape that they have on the hub.

    Raises ``MismatchError`` for scales that do not match their weight's blocks: vLLM's loader would broadcast them.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        scales = tensors.get(scale_name(name))
        if scales is None or tuple(scales.shape) == (grid := grid_of(tensor.shape, blocks)):
            continue
        # Transformers drops dimensions of one block when it splits experts.
        if [size for size in scales.shape if size > 1] != [size for size in grid if size > 1]:
            raise MismatchError(
                f"{name} of shape {list(tensor.shape)} has scales of shape {list(scales.shape)}, and its blocks of "
                f"{blocks[0]}x{blocks[1]} need {list(grid)}; weights that a model has fused can be quantized as one "
                "only where no block has elements of two of them"
            )
        found[scale_name(name)] = scales.view(grid)
    return found


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by their names in a model without wrappers for LoRA."""
    return {name.replace(".base_layer", ""): layer for name, layer in model.named_modules()}


def _ties(model: nn.Module) -> dict[str, str]:
    """Further names of the parameters of embeddings and heads, mapped to their first names.

    Names are those of stored tensors, without the wrappers of LoRA layers. Loaders use other shared parameters by their
    first name only.
    """
    first: dict[int, str] = {}
    named = (
        (f"{prefix}.{name}".replace(".base_layer.", "."), one)
        for prefix, layer in model.named_modules()
        if isinstance(layer, VocabParallelEmbedding)
        for name, one in layer.named_parameters(recurse=False)
    )
    return {name: known for name, one in named if (known := first.setdefault(id(one), name)) != name}


_receivers: WeakKeyDictionary[nn.Module, tuple[VllmModel, Receiver]] = WeakKeyDictionary()


def receiver_of(vllm_config: Any, model: nn.Module, runner: Any = None) -> Receiver:
    """The receiver of a worker's model, one for all ways to reach it.

    A start from peers has no runner, so the first request that has it sets it.
    """
    if model not in _receivers:
        made = VllmModel(vllm_config, model)
        keep_receiver(made, Receiver(made, device=compute_device()))
    known, receiver = _receivers[model]
    if known.runner is None:
        known.runner = runner
    return receiver


def receiver_of_draft(vllm_config: Any, runner: Any) -> Receiver:
    """The receiver of the draft model. Raises ``StateError`` for a worker without one that
    accepts pushes."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    drafter = getattr(runner, "drafter", None)
    # Other draft models share layers with the serving model, which a reload would change.
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or not isinstance(drafter, DraftModelProposer):
        raise StateError(
            "this engine has no separate draft model that accepts pushes: start it with --speculative-config of the "
            "method draft_model, with VLLM_USE_V2_MODEL_RUNNER=0, and without pipeline stages, of which only the last "
            "one has the draft model"
        )
    return receiver_of(drafter._create_draft_vllm_config(), runner.get_draft_model())


def keep_receiver(model: VllmModel, receiver: Receiver) -> None:
    """Make this the receiver of a worker's model."""
    _receivers[model.module] = model, receiver
