"""What this library uses of vLLM in addition to its documented interfaces, by part. Any release may change these names.

A part is imported only if this vLLM has all of its names. A test reports which names are gone, and that no module here
uses others.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from importlib import metadata

from ...errors import StateError

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
