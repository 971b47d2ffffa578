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
        self._names: dict[int, str] = {}  # by number, from the latest request
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
            for number in self._numbers(name):
                self._put_back(number)
            return
        self._made(1, adapter)  # fails now, not at the first request, if vLLM rejects the adapter
        self._pushed[name] = adapter
        for number in self._numbers(name):
            model = self._manager.get_adapter(number)
            if model is not None:
                if _source(model) is None:
                    self._own[number] = model
                self._put_in(self._made(number, adapter))

    def add(self, request: Any, vllm_add: Callable[[Any], bool]) -> bool:
        """Serve a request for an adapter: a pushed one, or what ``vllm_add`` loads."""
        self._names[request.lora_int_id] = request.lora_name
        adapter = self._pushed.get(request.lora_name)
        if adapter is None:
            return vllm_add(request)
        model = self._manager.get_adapter(request.lora_int_id)
        if model is None or _source(model) is not adapter:
            if model is not None and _source(model) is None:
                self._own[request.lora_int_id] = model
            self._put_in(self._made(request.lora_int_id, adapter))
            return True
        self._manager.activate_adapter(model.id)
        return True

    def _numbers(self, name: str) -> list[int]:
        return [number for number, known in self._names.items() if known == name]

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

    def _put_in(self, model: Any) -> None:
        """Replace the adapter in its slot and in vLLM's cache."""
        manager = self._manager
        pinned = model.id in manager._registered_adapters.pinned_items
        manager.remove_adapter(model.id)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        if model.loras:
            manager.add_adapter(model)
        else:  # all layers are on other pipeline stages; vLLM would access the first one
            manager._registered_adapters[model.id] = model
        manager.activate_adapter(model.id)
        if pinned:
            manager.pin_adapter(model.id)

    def _put_back(self, number: int) -> None:
        model = self._manager.get_adapter(number)
        if model is not None and _source(model) is not None:
            self._manager.remove_adapter(number)
        if number in self._own:
            self._put_in(self._own.pop(number))


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
    vllm_add = LRUCacheWorkerLoRAManager.add_adapter

    @functools.wraps(vllm_add)
    def add_adapter(self: Any, lora_request: Any) -> bool:
        return adapters_of(self._adapter_manager).add(lora_request, functools.partial(vllm_add, self))

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter


# On import, when the first adapter is pushed. Numbers of adapters that vLLM has already come with their next request.
_watch()
