"""Serve pushed LoRA adapters in vLLM's workers. Needs vLLM.

Each request for an adapter assigns it a number. vLLM reads the adapter from a path at the first request, after it was
evicted from the adapter cache, and after a change of the base model. For the name of a pushed adapter, this module
provides the pushed tensors instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.lora import layers as lora_layers
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    FusedMoEWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

from ...errors import StateError
from ..push.adapters import AdapterReceivers, LoraAdapter, LoraFactor, LoraLayer

_UNKNOWN = LoraLayer(None, None)
_HEADS: tuple[type, ...] = tuple(
    getattr(lora_layers, name) for name in ("ClassificationHeadWithLoRA",) if hasattr(lora_layers, name)
)
_VALIDATORS = ("_validate_moe_lora_format", "_validate_token_classification_lora")


class VllmAdapters:
    """An ``AdapterHost`` for one worker. ``manager`` is vLLM's, which assigns adapters to slots."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.dtype: torch.dtype = manager.lora_config.lora_dtype
        self.max_rank: int = manager.lora_config.max_lora_rank
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._skipped = getattr(manager.model, "lora_skip_prefixes", None)
        self._pushed: dict[str, LoraAdapter] = {}
        self._requests: dict[int, tuple[Any, Callable[[Any], bool]]] = {}  # by number: the latest, and what adds it
        self._own: dict[int, Any] = {}  # by number: vLLM's adapter before the first push
        self.receivers = AdapterReceivers(self)

    def check(self, config: Mapping[str, Any]) -> None:
        PEFTHelper.from_dict(dict(config)).validate_legal(self._manager.lora_config)

    @functools.cached_property
    def layers(self) -> dict[str, LoraLayer]:
        found: dict[str, LoraLayer] = {}
        for name, module in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name)
            if isinstance(module, _HEADS):
                continue
            if isinstance(module, FusedMoEWithLoRA):
                # Either one tensor for all experts or one tensor for each.
                found |= dict.fromkeys([name, f"{name}.base_layer", *(parts or ())], _UNKNOWN)
                found |= zip(parts or (), _expert_sizes(module, len(parts or ())), strict=True)
            elif parts is None:
                found[name] = LoraLayer(*_sizes(module))
            else:
                found |= zip(parts, _packed_sizes(module, len(parts)), strict=True)
        return found

    def factor_of(self, name: str) -> LoraFactor | None:
        if is_base_embedding_weights(name):
            return None
        if self._skipped and LoRAModel._should_skip_module(name, self._skipped):
            return None
        return LoraFactor(*parse_fine_tuned_lora_name(name, self._mapper))

    def is_elsewhere(self, module: str) -> bool:
        return f"{module}.".startswith(self._of_other_stages)

    @functools.cached_property
    def _of_other_stages(self) -> tuple[str, ...]:
        """Prefixes of the modules of other pipeline stages."""
        named = self._manager.model.named_modules(remove_duplicate=False)
        return tuple(f"{name}." for name, module in named if isinstance(module, PPMissingLayer))

    def pushed(self, name: str) -> LoraAdapter | None:
        return self._pushed.get(name)

    def put(self, name: str, adapter: LoraAdapter | None) -> None:
        if adapter is None:
            self._pushed.pop(name, None)
        else:
            self._made(1, adapter)  # fails now, not at the first request, if vLLM rejects the adapter
            self._pushed[name] = adapter
        for request, vllm_add in list(self._requests.values()):
            if request.lora_name == name and self._manager.get_adapter(request.lora_int_id) is not None:
                self.add(request, vllm_add)

    def add(self, request: Any, vllm_add: Callable[[Any], bool]) -> bool:
        """Serve a request for an adapter: vLLM loads one that it does not have, or that is another one by now."""
        manager, number = self._manager, request.lora_int_id
        held = manager._registered_adapters
        if number not in held:  # a load, which is rare: forget the requests for adapters that vLLM has evicted
            self._requests = {one: found for one, found in self._requests.items() if one in held}
        self._requests[number] = request, vllm_add
        adapter, model = self._pushed.get(request.lora_name), manager.get_adapter(number)
        is_pinned = False
        if model is not None and _source(model) is not adapter:
            if _source(model) is None:
                self._own[number] = model
            is_pinned = number in held.pinned_items
            manager.remove_adapter(number)
            model = None
        if model is None and adapter is not None and not adapter.tensors:
            # All layers are on other pipeline stages; vLLM would access the first one.
            held[number] = self._made(number, adapter)
        is_added = vllm_add(request)
        if is_pinned:
            manager.pin_adapter(number)
        return is_added

    def load(self, request: Any, vllm_load: Callable[[Any], Any]) -> Any:
        """Load an adapter for vLLM: a pushed one, what vLLM had before the first push, or what it reads."""
        adapter = self._pushed.get(request.lora_name)
        if adapter is not None:
            return self._made(request.lora_int_id, adapter)
        own = self._own.pop(request.lora_int_id, None)
        return vllm_load(request) if own is None else own

    def _made(self, number: int, adapter: LoraAdapter) -> Any:
        # vLLM scales tensors in place.
        tensors = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
        model = LoRAModel.from_lora_tensors(
            number,
            tensors,
            PEFTHelper.from_dict(dict(adapter.config)),
            device="cpu",
            dtype=self.dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=self._mapper,
            skip_prefixes=self._skipped,
        )
        for name in _VALIDATORS:
            if hasattr(self._manager, name):
                getattr(self._manager, name)(model)
        model.bcp_source = adapter
        return model


def adapters_of(manager: Any) -> VllmAdapters:
    """The adapters of vLLM's adapter manager, created on first use."""
    if not hasattr(manager, "bcp_adapters"):
        manager.bcp_adapters = VllmAdapters(manager)
    found: VllmAdapters = manager.bcp_adapters
    return found


def receivers_of(model: Any) -> AdapterReceivers:
    """The adapter receivers of a worker's model. Raises ``StateError`` for an engine without LoRA."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise StateError("this engine was not started with LoRA; start it with --enable-lora and a --max-lora-rank")
    return adapters_of(manager).receivers


def _source(model: Any) -> LoraAdapter | None:
    """The pushed adapter that a vLLM LoRA model was made from; None if vLLM read it from files."""
    return getattr(model, "bcp_source", None)


def _sizes(module: BaseLayerWithLoRA) -> tuple[int | None, int | None]:
    if isinstance(module, LogitsProcessorWithLoRA):
        return module.hidden_size, module.base_layer.vocab_size
    layer = module.base_layer
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return layer.org_vocab_size, layer.embedding_dim
    if isinstance(layer, QKVParallelLinear):
        return layer.input_size, sum(_qkv_sizes(layer))
    return getattr(layer, "input_size", None), getattr(layer, "output_size", None)


def _packed_sizes(module: BaseLayerWithLoRA, count: int) -> Iterator[LoraLayer]:
    layer = module.base_layer
    sizes = _qkv_sizes(layer) if isinstance(layer, QKVParallelLinear) else getattr(layer, "output_sizes", [])
    for number in range(count):
        # Otherwise a part has several slices, whose sizes vLLM derives from its rows.
        yield LoraLayer(layer.input_size, sizes[number]) if len(sizes) == count else _UNKNOWN


def _expert_sizes(module: FusedMoEWithLoRA, count: int) -> Iterator[LoraLayer]:
    """Sizes in vLLM's order: for each expert the gate, down and, if the experts are gated, up projection."""
    inner = module.intermediate_size_per_partition * module.tp_size
    kinds = [LoraLayer(module.hidden_size, inner, False), LoraLayer(inner, module.hidden_size, False)]
    kinds += kinds[:1] * (module._w13_slices - 1)
    for number in range(count):
        # Otherwise one tensor contains all experts.
        yield kinds[number % len(kinds)] if count == len(kinds) * module.global_num_experts else _UNKNOWN


def _qkv_sizes(layer: QKVParallelLinear) -> list[int]:
    """Sizes of the unsharded layer; the layer's own sizes count replicated heads several times."""
    heads = layer.total_num_kv_heads
    return [layer.total_num_heads * layer.head_size, heads * layer.head_size, heads * layer.v_head_size]


def _watch() -> None:
    """Let pushed adapters take precedence over files in vLLM's manager."""
    vllm_add, vllm_load = LRUCacheWorkerLoRAManager.add_adapter, LRUCacheWorkerLoRAManager._load_adapter

    @functools.wraps(vllm_add)
    def add_adapter(self: Any, lora_request: Any) -> bool:
        return adapters_of(self._adapter_manager).add(lora_request, functools.partial(vllm_add, self))

    @functools.wraps(vllm_load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        return adapters_of(self._adapter_manager).load(lora_request, functools.partial(vllm_load, self))

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter
    LRUCacheWorkerLoRAManager._load_adapter = load_adapter


# On import, when the first adapter is pushed. Numbers of adapters that vLLM has already come with their next request.
_watch()
