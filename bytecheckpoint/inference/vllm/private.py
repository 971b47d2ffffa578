"""What this library uses of vLLM in addition to its documented interfaces, by part. Any release may change these names.

A part is imported only if this vLLM has all of its names. A test reports which names are gone, and that no module here
uses others.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ...errors import StateError

__all__ = ["ATTRIBUTES", "OPTIONAL", "PARTS", "TESTED", "check_part", "missing_attributes", "missing_names"]

TESTED = "0.30 to 0.32"
"""The releases with which the tests run: everything with the newest, load format and pushes with each."""

PARTS: Mapping[str, Sequence[str]] = {
    "loader": (
        "vllm.config:LoadConfig",
        "vllm.config:ModelConfig",
        "vllm.config:get_current_vllm_config",
        "vllm.logger:init_logger",
        "vllm.model_executor.model_loader:register_model_loader",
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader",
    ),
    "push": (
        "vllm.config:get_current_vllm_config",
        "vllm.config:set_current_vllm_config",
        "vllm.model_executor.layers.quantization.fp8:Fp8Config",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        "vllm.model_executor.model_loader:get_model_loader",
        "vllm.model_executor.model_loader.reload.layerwise:LOADING_LAYERS",
        "vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors",
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
        "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
        "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
        "vllm.model_executor.model_loader.reload.meta:restore_layer_on_meta",
        "vllm.model_executor.model_loader.utils:initialize_model",
        "vllm.model_executor.models.utils:_model_to_pp_missing_layer_names",
        "vllm.utils.torch_utils:set_default_torch_dtype",
    ),
    "transfer": (
        "vllm.distributed.weight_transfer.base:WeightTransferEngine",
        "vllm.distributed.weight_transfer.base:WeightTransferInitInfo",
        "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo",
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory",
    ),
    "trainer": (
        "vllm.distributed.weight_transfer.base:ModuleSource",
        "vllm.distributed.weight_transfer.base:TrainerInitInfo",
        "vllm.distributed.weight_transfer.base:TrainerWeightTransferEngine",
        "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory",
    ),
    "drafts": (
        "vllm.v1.spec_decode.draft_model:DraftModelProposer",
        "vllm.v1.spec_decode.draft_model:DraftModelProposer._create_draft_vllm_config",
    ),
    "adapters": (
        "vllm.lora.layers:BaseLayerWithLoRA",
        "vllm.lora.layers:FusedMoEWithLoRA",
        "vllm.lora.layers:LogitsProcessorWithLoRA",
        "vllm.lora.layers:VocabParallelEmbeddingWithLoRA",
        "vllm.lora.lora_model:LoRAModel",
        "vllm.lora.lora_model:LoRAModel._should_skip_module",
        "vllm.lora.peft_helper:PEFTHelper",
        "vllm.lora.utils:is_base_embedding_weights",
        "vllm.lora.utils:parse_fine_tuned_lora_name",
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        "vllm.model_executor.models.utils:PPMissingLayer",
    ),
}
"""``module:name`` of everything that is imported, and of private attributes of classes."""

ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "CuMemAllocator": ("vllm.device_allocator.cumem", "the allocator of an engine that can sleep"),
    "_active_adapters": ("vllm.lora.model_manager", "of an adapter manager: the adapters in slots"),
    "_adapter_manager": ("vllm.lora.worker_manager", "of LRUCacheWorkerLoRAManager: the manager of slots"),
    "_do_torchao_reload": ("vllm.model_executor.model_loader.reload.layerwise", "of a model during a reload"),
    "_module": ("vllm.distributed.weight_transfer.base", "of ModuleSource: its module"),
    "_original_do_torchao_reload": ("vllm.model_executor.model_loader.reload.layerwise", "of a model during a reload"),
    "_registered_adapters": ("vllm.lora.model_manager", "of an adapter manager: its cache"),
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
    "reset_sharded_to_full_mapping": ("vllm.lora.layers.logits_processor", "of the layer of logits with adapters"),
    "speculator": ("vllm.v1.worker.gpu.model_runner", "of model runner V2, whose drafts are refused"),
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


def missing_names(part: str) -> list[str]:
    """Return the names of a part that this vLLM does not have."""
    return [name for name in PARTS[part] if not _exists(name)]


@functools.cache
def check_part(part: str) -> None:
    """Raise ``StateError`` when this vLLM does not have all names of a part, and an import's error without vLLM."""
    missing = missing_names(part)
    if any(name.startswith("vllm") for name in missing) and importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    if missing:
        try:
            version = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            version = "of this environment"
        raise StateError(
            f"vLLM {version} lacks {', '.join(missing)}, which {part!r} of this library needs; it was tested with "
            f"{TESTED}. Other parts are not affected"
        )


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True
