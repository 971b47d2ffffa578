"""Derive the names and shapes of a model's tensors on the hub from its configuration.

These are the tensors that an engine's loader expects: one tensor per expert and projection. Each supported family of
models has a rule here. For other models, the caller passes the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.layouts.hub_names import scale_name

__all__ = ["StoredTensor", "hub_shapes"]

StoredTensor = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype."""

_DECODERS = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

_Config = Mapping[str, Any]
_Linear = Callable[[str, int, int], Iterator[StoredTensor]]


def hub_shapes(config: _Config) -> list[StoredTensor]:
    """The stored tensors in layer order. Raises ``StateError`` for an architecture without a rule."""
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in _DECODERS:
        raise StateError(
            f"the stored tensors of architecture {architecture!r} cannot be derived from its configuration (supported: "
            f"{', '.join(_DECODERS)}); pass their names, shapes and dtypes"
        )
    return list(_decoder(config))


def _decoder(config: _Config) -> Iterator[StoredTensor]:
    """Llama, Mistral, Qwen 2 and 3, Qwen 3 with experts, GLM 4.5, DeepSeek V3 and Kimi K2."""
    hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
    dtype, linear = _dtype(config), _linear(config)
    layers = int(config["num_hidden_layers"])
    yield "model.embed_tokens.weight", (vocabulary, hidden), dtype
    for layer in range(layers + int(config.get("num_nextn_predict_layers") or 0)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), dtype
        attention = _latent_attention if config.get("kv_lora_rank") else _attention
        yield from attention(config, f"{prefix}.self_attn", linear)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), dtype
        if _has_experts(config, layer):
            yield from _experts(config, f"{prefix}.mlp", linear)
        else:
            yield from _gated(f"{prefix}.mlp", hidden, int(config["intermediate_size"]), linear)
        if layer >= layers:
            yield from _prediction_head(config, prefix)
    yield "model.norm.weight", (hidden,), dtype
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, hidden), dtype


def _attention(config: _Config, prefix: str, linear: _Linear) -> Iterator[StoredTensor]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    kind = str(config["architectures"][0])
    biases = kind.startswith("Qwen2") or bool(config.get("attention_bias"))
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield from linear(f"{prefix}.{name}_proj", count * size, hidden)
        if biases:
            yield f"{prefix}.{name}_proj.bias", (count * size,), _dtype(config)
    yield from linear(f"{prefix}.o_proj", hidden, heads * size)
    if config.get("attention_bias") and kind.startswith("Llama"):
        yield f"{prefix}.o_proj.bias", (hidden,), _dtype(config)
    if kind.startswith("Qwen3") or config.get("use_qk_norm"):
        for name in ("q", "k"):
            yield f"{prefix}.{name}_norm.weight", (size,), _dtype(config)


def _latent_attention(config: _Config, prefix: str, linear: _Linear) -> Iterator[StoredTensor]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    query, latent = config.get("q_lora_rank"), int(config["kv_lora_rank"])
    nope, rope, value = (int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if query:
        yield from linear(f"{prefix}.q_a_proj", int(query), hidden)
        yield f"{prefix}.q_a_layernorm.weight", (int(query),), _dtype(config)
        yield from linear(f"{prefix}.q_b_proj", heads * (nope + rope), int(query))
    else:
        yield from linear(f"{prefix}.q_proj", heads * (nope + rope), hidden)
    yield from linear(f"{prefix}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,), _dtype(config)
    yield from linear(f"{prefix}.kv_b_proj", heads * (nope + value), latent)
    yield from linear(f"{prefix}.o_proj", hidden, heads * value)


def _experts(config: _Config, prefix: str, linear: _Linear) -> Iterator[StoredTensor]:
    hidden, width = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    count = _expert_count(config)
    yield f"{prefix}.gate.weight", (count, hidden), _dtype(config)
    if config.get("n_routed_experts"):
        # Load balancing updates this bias, not gradients; it is stored in full precision.
        yield f"{prefix}.gate.e_score_correction_bias", (count,), torch.float32
    for expert in range(count):
        yield from _gated(f"{prefix}.experts.{expert}", hidden, width, linear)
    shared = int(config.get("n_shared_experts") or 0)
    if shared:
        yield from _gated(f"{prefix}.shared_experts", hidden, shared * width, linear)


def _gated(prefix: str, hidden: int, width: int, linear: _Linear) -> Iterator[StoredTensor]:
    yield from linear(f"{prefix}.gate_proj", width, hidden)
    yield from linear(f"{prefix}.up_proj", width, hidden)
    yield from linear(f"{prefix}.down_proj", hidden, width)


def _prediction_head(config: _Config, prefix: str) -> Iterator[StoredTensor]:
    """The additional tensors of a multi-token prediction layer, which follows the last layer."""
    hidden, vocabulary, dtype = int(config["hidden_size"]), int(config["vocab_size"]), _dtype(config)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{name}.weight", (hidden,), dtype
    yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), dtype
    yield f"{prefix}.embed_tokens.weight", (vocabulary, hidden), dtype
    yield f"{prefix}.shared_head.head.weight", (vocabulary, hidden), dtype


def _expert_count(config: _Config) -> int:
    return int(config.get("n_routed_experts") or config.get("num_experts") or 0)


def _has_experts(config: _Config, layer: int) -> bool:
    if not _expert_count(config) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if "first_k_dense_replace" in config:
        return layer >= int(config["first_k_dense_replace"]) and layer % int(config.get("moe_layer_freq") or 1) == 0
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _linear(config: _Config) -> _Linear:
    """The rule for a matrix: one tensor, or 8-bit values with a scale for each block."""
    quantization = config.get("quantization_config")
    if not quantization:
        return lambda name, rows, columns: iter([(f"{name}.weight", (rows, columns), _dtype(config))])
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not block:
        raise StateError(
            f"the stored tensors of quantization {quantization.get('quant_method')!r} cannot be derived from the "
            "configuration; pass their names, shapes and dtypes"
        )

    def scaled(name: str, rows: int, columns: int) -> Iterator[StoredTensor]:
        yield f"{name}.weight", (rows, columns), torch.float8_e4m3fn
        yield scale_name(f"{name}.weight"), (-(-rows // block[0]), -(-columns // block[1])), torch.float32

    return scaled


def _dtype(config: _Config) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"the model's configuration names the dtype {name!r}, which torch does not have")
    return dtype
