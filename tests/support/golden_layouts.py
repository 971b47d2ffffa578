"""The models and engines whose layouts are stored as golden files.

The shapes come from the models' public configurations. The tests that replay the files need no vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "inference" / "golden"

_DECODER: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}

_QWEN3_MOE = _DECODER | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}  # fmt: skip

_DEEPSEEK_V3 = _DECODER | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-70b": _DECODER | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    "qwen3-235b-a22b": _QWEN3_MOE | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "deepseek-v3": _DEEPSEEK_V3 | {
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "vocab_size": 129280,
        "rope_theta": 10000.0,
    },
    "kimi-k2": _DEEPSEEK_V3 | {
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "vocab_size": 163840, "rope_theta": 50000.0,
    },
    "glm-4.5-air": _DECODER | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1, "use_qk_norm": False, "vocab_size": 151552, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    },
    # Artificial: a padded vocabulary, fewer key-value heads than ranks, an odd number of layers.
    "small-dense": _DECODER | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
    "small-moe": _QWEN3_MOE | {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
        "vocab_size": 1000, "max_position_embeddings": 128,
    },
}  # fmt: skip

_TP = [{"tp": tp, "pp": 1, "ep": False} for tp in (1, 2, 4, 8, 16)]
ENGINES: dict[str, list[dict[str, Any]]] = {
    "llama-3-70b": _TP,
    "qwen3-235b-a22b": [*_TP, {"tp": 8, "pp": 1, "ep": True}],
    "deepseek-v3": [*_TP, {"tp": 16, "pp": 1, "ep": True}],
    "kimi-k2": [{"tp": 16, "pp": 1, "ep": False}],
    "glm-4.5-air": [{"tp": 8, "pp": 1, "ep": False}],
    "small-dense": [
        *_TP[:3],
        {"tp": 1, "pp": 2, "ep": False},
        {"tp": 2, "pp": 2, "ep": False},
    ],
    "small-moe": [
        *_TP[:3],
        {"tp": 1, "pp": 2, "ep": False},
        {"tp": 2, "pp": 2, "ep": False},
        {"tp": 2, "pp": 1, "ep": True},
        {"tp": 2, "pp": 2, "ep": True},
    ],
}
"""The engines by model. Each file contains the layouts of all ranks of one engine."""


def file_of(model: str, engine: dict[str, Any]) -> Path:
    parallel = (
        f"tp{engine['tp']}" + (f"-pp{engine['pp']}" if engine["pp"] > 1 else "") + ("-ep" if engine["ep"] else "")
    )
    return GOLDEN / f"{model}-{parallel}.layouts"
