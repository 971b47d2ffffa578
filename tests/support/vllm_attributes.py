"""Attributes of vLLM's objects that this library uses although they are private, or public but internal."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "CuMemAllocator": ("vllm.device_allocator.cumem", "the allocator of an engine that can sleep"),
    "__version__": ("vllm", "of the package"),
    "_active_adapters": ("vllm.lora.model_manager", "of an adapter manager: the adapters in slots"),
    "_adapter_manager": ("vllm.lora.worker_manager", "of LRUCacheWorkerLoRAManager: the manager of slots"),
    "_create_draft_vllm_config": ("vllm.v1.spec_decode.draft_model", "of DraftModelProposer"),
    "_do_torchao_reload": ("vllm.model_executor.model_loader.reload.layerwise", "of a model during a reload"),
    "_load_adapter": ("vllm.lora.worker_manager", "of LRUCacheWorkerLoRAManager: reads an adapter"),
    "_model_to_pp_missing_layer_names": ("vllm.model_executor.models.utils", "layers of other pipeline stages"),
    "_original_do_torchao_reload": ("vllm.model_executor.model_loader.reload.layerwise", "of a model during a reload"),
    "_registered_adapters": ("vllm.lora.model_manager", "of an adapter manager: its cache"),
    "_should_skip_module": ("vllm.lora.lora_model", "of LoRAModel"),
    "_validate_moe_lora_format": ("vllm.lora.model_manager", "of an adapter manager; not in 0.31"),
    "_validate_token_classification_lora": ("vllm.lora.model_manager", "of an adapter manager; renamed in 0.33"),
    "_w13_slices": ("vllm.lora.layers.fused_moe", "of FusedMoEWithLoRA: projections in its first matrix"),
    "drafter": ("vllm.v1.worker.gpu_model_runner", "of a model runner: the proposer of drafts"),
    "elastic_ep_max_dp_size": ("vllm.config.parallel", "of a configuration: data-parallel replicas of a dense model"),
    "get_all_weights": ("vllm.model_executor.model_loader.default_loader", "of a loader: what a reload loads"),
    "get_draft_model": ("vllm.v1.worker.gpu_model_runner", "of a model runner"),
    "hf_to_vllm_mapper": ("vllm.model_executor.models.interfaces", "of a model: renames tensors of the hub"),
    "is_asleep": ("vllm.device_allocator.cumem", "of an allocation of CuMemAllocator"),
    "kernel_tensors": ("vllm.model_executor.model_loader.reload.types", "of the record of a layer's reload"),
    "kv_cache": ("vllm.model_executor.layers.attention.attention", "of an attention layer"),
    "loaded_weights": ("vllm.model_executor.model_loader.reload.types", "of the record of a layer's reload"),
    "lora_manager": ("vllm.lora.model_manager", "of a model: its adapter manager"),
    "lora_skip_prefixes": ("vllm.model_executor.models.interfaces", "of a model: modules without adapters"),
    "moe_kernel": ("vllm.model_executor.layers.fused_moe.fused_moe_method_base", "of a method: computes experts"),
    "pinned_items": ("vllm.utils.cache", "of a cache of adapters"),
    "pointer_to_data": ("vllm.device_allocator.cumem", "of CuMemAllocator: its allocations"),
    "quant_method": ("vllm.model_executor.layers.linear", "of a layer"),
    "reset_encoder_cache": ("vllm.v1.worker.gpu_model_runner", "of a model runner"),
    "reset_lora_state": ("vllm.v1.worker.lora_model_runner_mixin", "of a model runner"),
    "reset_mm_cache": ("vllm.v1.worker.gpu_model_runner", "of a model runner"),
    "static_all_moe_layers": ("vllm.config.compilation", "of a configuration: the serving model's experts"),
    "static_forward_context": ("vllm.config.compilation", "of a configuration: the serving model's layers"),
}
"""Attributes of objects that are private, or public but internal: the module that has them, and whose they are."""

OPTIONAL = frozenset({"_validate_moe_lora_format", "_validate_token_classification_lora"})
"""Attributes that some supported releases do not have."""


def missing_attributes() -> list[str]:
    """Return the attributes that the source of this vLLM does not have where they are expected."""
    return [name for name, (module, _) in ATTRIBUTES.items() if name not in OPTIONAL and not _mentions(module, name)]


def _mentions(module: str, name: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return False
    if found is None or found.origin is None:
        return False
    return re.search(rf"\b{name}\b", Path(found.origin).read_text(encoding="utf-8")) is not None
