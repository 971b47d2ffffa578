"""LoRA adapters of vLLM's workers that are pushed, not read from files. Needs vLLM.

vLLM knows an adapter by a number that whoever asks gives it, and reads it from a path when it has it not: at the first
request, after its cache of adapters dropped it, and after a change of the base model. Of a name that was pushed, what
was pushed is put in each time instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    ClassificationHeadWithLoRA,
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

from ..errors import StateError
from .push.adapter_model import Adapter, AdapterReceivers, Piece, Site

__all__ = ["VllmAdapters", "adapters_of", "receivers_of"]

_UNKNOWN = Site(None, None)


class VllmAdapters:
    """An ``AdapterHost``: the adapters of one worker. ``manager`` is vLLM's, which puts them into slots."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.dtype: torch.dtype = manager.lora_config.lora_dtype
        self.max_rank: int = manager.lora_config.max_lora_rank
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._skipped = getattr(manager.model, "lora_skip_prefixes", None)
        self._pushed: dict[str, Adapter] = {}
        self._names: dict[int, str] = {}  # of numbers, as they were last asked for
        self._own: dict[int, Any] = {}  # what vLLM had before anything was pushed
        self.receivers = AdapterReceivers(self)

    def check(self, config: Mapping[str, Any]) -> None:
        PEFTHelper.from_dict(dict(config)).validate_legal(self._manager.lora_config)

    def sites(self) -> Mapping[str, Site]:
        return self._sites

    @functools.cached_property
    def _sites(self) -> dict[str, Site]:
        found: dict[str, Site] = {}
        for name, module in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name)
            if isinstance(module, ClassificationHeadWithLoRA):
                continue
            if isinstance(module, FusedMoEWithLoRA):
                # As one tensor of all experts, or as many of one each.
                found |= dict.fromkeys([name, f"{name}.base_layer", *(parts or ())], _UNKNOWN)
                found |= zip(parts or (), _expert_sizes(module, len(parts or ())))
            elif parts is None:
                found[name] = Site(*_sizes(module))
            else:
                found |= zip(parts, _packed_sizes(module, len(parts)))
        return found

    def piece_of(self, name: str) -> Piece | None:
        if is_base_embedding_weights(name):
            return None
        if self._skipped and LoRAModel._should_skip_module(name, self._skipped):
            return None
        return Piece(*parse_fine_tuned_lora_name(name, self._mapper))

    def is_elsewhere(self, module: str) -> bool:
        return f"{module}.".startswith(self._of_other_stages)

    @functools.cached_property
    def _of_other_stages(self) -> tuple[str, ...]:
        """What begins so is of another pipeline stage."""
        named = self._manager.model.named_modules(remove_duplicate=False)
        return tuple(f"{name}." for name, module in named if isinstance(module, PPMissingLayer))

    def pushed(self, name: str) -> Adapter | None:
        return self._pushed.get(name)

    def put(self, name: str, adapter: Adapter | None) -> None:
        if adapter is None:
            self._pushed.pop(name, None)
            for number in self._numbers(name):
                self._put_back(number)
            return
        self._made(1, adapter)  # what vLLM does not take is found now, and not when somebody asks for it
        self._pushed[name] = adapter
        for number in self._numbers(name):
            model = self._manager.get_adapter(number)
            if model is not None:
                if _source(model) is None:
                    self._own[number] = model
                self._put_in(self._made(number, adapter))

    def add(self, request: Any, vllm_add: Callable[[Any], bool]) -> bool:
        """What vLLM does when an adapter is asked for."""
        self._names[request.lora_int_id] = request.lora_name
        adapter = self._pushed.get(request.lora_name)
        if adapter is None:
            return vllm_add(request)
        model = self._manager.get_adapter(request.lora_int_id)
        if model is None or _source(model) is not adapter:
            self._put_in(self._made(request.lora_int_id, adapter))
            return True
        self._manager.activate_adapter(model.id)
        return True

    def _numbers(self, name: str) -> list[int]:
        return [number for number, known in self._names.items() if known == name]

    def _made(self, number: int, adapter: Adapter) -> Any:
        # vLLM scales tensors where they lie.
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
        self._manager._validate_moe_lora_format(model)
        self._manager._validate_token_classification_lora(model)
        model.bcp_source = adapter
        return model

    def _put_in(self, model: Any) -> None:
        """As vLLM loads an adapter in place: it is in a slot, and nowhere as it was."""
        manager = self._manager
        pinned = model.id in manager._registered_adapters.pinned_items
        manager.remove_adapter(model.id)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        if model.loras:
            manager.add_adapter(model)
        else:  # all of it is on other pipeline stages; vLLM looks at the first of its layers
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
    """The one of vLLM's manager of adapters, for as long as that lives."""
    if not hasattr(manager, "bcp_adapters"):
        manager.bcp_adapters = VllmAdapters(manager)
    found: VllmAdapters = manager.bcp_adapters
    return found


def receivers_of(model: Any) -> AdapterReceivers:
    """Of a worker. Raises ``StateError`` for an engine without LoRA."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise StateError("this engine was not started with LoRA; start it with --enable-lora and a --max-lora-rank")
    return adapters_of(manager).receivers


def _source(model: Any) -> Adapter | None:
    """What a model of vLLM was made from; None where vLLM read it."""
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


def _packed_sizes(module: BaseLayerWithLoRA, count: int) -> Iterator[Site]:
    layer = module.base_layer
    sizes = _qkv_sizes(layer) if isinstance(layer, QKVParallelLinear) else getattr(layer, "output_sizes", [])
    for number in range(count):
        # Otherwise one of the parts is of several slices, and vLLM finds out by its rows.
        yield Site(layer.input_size, sizes[number]) if len(sizes) == count else _UNKNOWN


def _expert_sizes(module: FusedMoEWithLoRA, count: int) -> Iterator[Site]:
    """As vLLM names them: of each expert the gate, what leads back, and, where there is a gate, what it is for."""
    inner = module.intermediate_size_per_partition * module.tp_size
    kinds = [Site(module.hidden_size, inner, False), Site(inner, module.hidden_size, False)]
    kinds += kinds[:1] * (module._w13_slices - 1)
    for number in range(count):
        # Otherwise they are those of all experts in one.
        yield kinds[number % len(kinds)] if count == len(kinds) * module.global_num_experts else _UNKNOWN


def _qkv_sizes(layer: QKVParallelLinear) -> list[int]:
    """Of the whole layer: its own sizes count heads that are there on several workers as often."""
    heads = layer.total_num_kv_heads
    return [layer.total_num_heads * layer.head_size, heads * layer.head_size, heads * layer.v_head_size]


def _watch() -> None:
    """Have vLLM ask for each adapter here first."""
    vllm_add = LRUCacheWorkerLoRAManager.add_adapter

    @functools.wraps(vllm_add)
    def add_adapter(self: Any, lora_request: Any) -> bool:
        return adapters_of(self._adapter_manager).add(lora_request, functools.partial(vllm_add, self))

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter


# When this is imported, as the numbers that vLLM has for names are heard of only when adapters are asked for.
_watch()
