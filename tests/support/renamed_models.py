"""A small Llama under the names of the hub, and fused by slicing under those of Megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import bytecheckpoint as bcp
from bytecheckpoint.rules import Rules

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN, WIDTH, VOCABULARY = 2, 8, 2, 3, 6, 7, 11
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}
HUB = Rules.shipped("hf-decoder", "hf-mlp", **SIZES)


def hub_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small Llama under the names of the hub."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN)}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.q_proj": (HEADS * SIZE, HIDDEN)}
        shapes |= {f"{layer}.self_attn.{part}_proj": (KV_HEADS * SIZE, HIDDEN) for part in "kv"}
        shapes |= {f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * SIZE), f"{layer}.mlp.down_proj": (HIDDEN, WIDTH)}
        shapes |= {f"{layer}.mlp.{part}_proj": (WIDTH, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{layer}.{one}_layernorm": (HIDDEN,) for one in ("input", "post_attention")}
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def trained_tensors(hub: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model under the names of Megatron-core, fused by slicing."""
    found = {
        "embedding.word_embeddings.weight": hub["model.embed_tokens.weight"],
        "output_layer.weight": hub["lm_head.weight"],
        "decoder.final_layernorm.weight": hub["model.norm.weight"],
    }
    for number in range(LAYERS):
        old, new = f"model.layers.{number}", f"decoder.layers.{number}"
        q, k, v = (hub[f"{old}.self_attn.{part}_proj.weight"].view(KV_HEADS, -1, HIDDEN) for part in "qkv")
        found[f"{new}.self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, HIDDEN)
        found[f"{new}.self_attention.linear_qkv.layer_norm_weight"] = hub[f"{old}.input_layernorm.weight"]
        found[f"{new}.self_attention.linear_proj.weight"] = hub[f"{old}.self_attn.o_proj.weight"]
        found[f"{new}.mlp.linear_fc1.layer_norm_weight"] = hub[f"{old}.post_attention_layernorm.weight"]
        gate_up = [hub[f"{old}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        found[f"{new}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
        found[f"{new}.mlp.linear_fc2.weight"] = hub[f"{old}.mlp.down_proj.weight"]
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save(path: Path, codec: str | None = None, **more: Any) -> dict[str, torch.Tensor]:
    hub = hub_tensors()
    bcp.save(
        path,
        {"model": trained_tensors(hub), "extra_state": {"step": 3}, **more},
        step=3,
        options=bcp.SaveOptions(chunk_size=64, codec=codec),
    )
    return hub
