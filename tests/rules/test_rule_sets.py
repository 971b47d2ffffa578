"""The rules that this library contains, compared with tensors that were converted by hand.

``tests/engines/test_megatron_rules.py`` compares those for ranks of Megatron with real models.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from rule_cases import renamed

from benchmarks.hub_shapes import hub_shapes
from bytecheckpoint.errors import RuleError
from bytecheckpoint.rules import Rules
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.metadata import BasicMeta

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN, WIDTH, VOCABULARY, EXPERTS = 2, 8, 2, 3, 5, 7, 11, 3
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
}  # fmt: skip
ROWS = (HEADS + 2 * KV_HEADS) * SIZE


def dense(layer: str, *, biases: bool, norms: bool) -> dict[str, tuple[int, ...]]:
    return {
        **attention(layer, biases=biases, norms=norms),
        f"{layer}.mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        f"{layer}.mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
        f"{layer}.mlp.linear_fc2.weight": (HIDDEN, WIDTH),
    }


def attention(layer: str, *, biases: bool, norms: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        f"{layer}.self_attention.linear_qkv.weight": (ROWS, HIDDEN),
        f"{layer}.self_attention.linear_proj.weight": (HIDDEN, HEADS * SIZE),
    }
    if biases:
        shapes[f"{layer}.self_attention.linear_qkv.bias"] = (ROWS,)
    if norms:
        shapes |= {f"{layer}.self_attention.{x}_layernorm.weight": (SIZE,) for x in "qk"}
    return shapes


def sparse(layer: str, *, norms: bool) -> dict[str, tuple[int, ...]]:
    shapes = attention(layer, biases=False, norms=norms)
    shapes |= {f"{layer}.pre_mlp_layernorm.weight": (HIDDEN,), f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        shapes[f"{layer}.mlp.experts.experts.{expert}.linear_fc1.weight"] = (2 * WIDTH, HIDDEN)
        shapes[f"{layer}.mlp.experts.experts.{expert}.linear_fc2.weight"] = (HIDDEN, WIDTH)
    return shapes


def model(*layers: dict[str, tuple[int, ...]]) -> dict[str, BasicMeta]:
    shapes = {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "output_layer.weight": (VOCABULARY, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        **{name: shape for layer in layers for name, shape in layer.items()},
    }
    return {name: BasicMeta(DTYPES["float32"], shape) for name, shape in shapes.items()}


NAMES = [f"decoder.layers.{layer}" for layer in range(LAYERS)]
HUB = {
    "LlamaForCausalLM": ("hf-mlp", [dense(name, biases=False, norms=False) for name in NAMES]),
    "Qwen2ForCausalLM": ("hf-mlp", [dense(name, biases=True, norms=False) for name in NAMES]),
    "Qwen3ForCausalLM": ("hf-mlp", [dense(name, biases=False, norms=True) for name in NAMES]),
    "Qwen3MoeForCausalLM": ("hf-qwen-moe", [sparse(name, norms=True) for name in NAMES]),
}


@pytest.mark.parametrize("architecture", HUB)
def test_names_and_shapes_are_those_of_the_hub(architecture: str) -> None:
    name, layers = HUB[architecture]
    rules = Rules.shipped("hf-decoder", name, **SIZES)
    metas = model(*layers)
    found = {name: tensor.meta.shape for name, tensor in renamed(rules, metas).tensors.items()}
    config = {key: value for key, value in CONFIG.items() if name == "hf-qwen-moe" or "experts" not in key}
    assert found == {name: shape for name, shape, _ in hub_shapes({**config, "architectures": [architecture]})}
    hub = {name: BasicMeta(DTYPES["float32"], shape) for name, shape in found.items()}
    back = renamed(rules.inverse(), hub).tensors
    assert {name: tensor.meta for name, tensor in back.items()} == metas


def test_mixtral() -> None:
    rules = Rules.shipped("hf-decoder", "hf-mixtral", **SIZES)
    tensors = renamed(rules, model(sparse(NAMES[0], norms=False))).tensors
    prefix = "model.layers.0.block_sparse_moe"
    for name, first in (("w1", 0), ("w3", WIDTH)):
        tensor = tensors[f"{prefix}.experts.2.{name}.weight"]
        assert tensor.meta.shape == (WIDTH, HIDDEN)
        (region,) = tensor.regions
        assert region.within.offsets == (first, 0)
    assert tensors[f"{prefix}.experts.2.w2.weight"].meta.shape == (HIDDEN, WIDTH)
    assert tensors[f"{prefix}.gate.weight"].meta.shape == (EXPERTS, HIDDEN)


def test_queries_keys_and_values_are_taken_from_their_groups() -> None:
    rules = Rules.shipped("hf-decoder", "hf-mlp", **SIZES)
    fused = np.arange(ROWS * HIDDEN).reshape(ROWS, HIDDEN)
    groups = fused.reshape(KV_HEADS, HEADS // KV_HEADS + 2, SIZE, HIDDEN)
    expected = {
        "q": groups[:, :-2].reshape(-1, HIDDEN),
        "k": groups[:, -2].reshape(-1, HIDDEN),
        "v": groups[:, -1].reshape(-1, HIDDEN),
    }
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    tensors = renamed(rules, {name: BasicMeta(DTYPES["int64"], fused.shape)}).tensors
    for part, array in expected.items():
        tensor = tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
        found = np.full(tensor.meta.shape, -1)
        for region in tensor.regions:
            found[region.box.slices()] = fused[region.within.slices()]
        assert np.array_equal(found, array)


def test_what_the_sets_need() -> None:
    with pytest.raises(RuleError, match=re.escape("parts has an entry 'q' that is the variable 'heads', which has no")):
        Rules.shipped("hf-decoder")
    with pytest.raises(RuleError, match=r"there is no set of rules 'megatorn'; sets: hf-decoder, .*, megatron, "):
        Rules.shipped("megatorn")
