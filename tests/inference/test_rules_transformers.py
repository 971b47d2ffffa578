"""Models of transformers load a checkpoint whose names are those of Megatron-core, and exports of it, by rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.rules import Rules

transformers = pytest.importorskip("transformers", reason="make test-vllm installs transformers")

HEADS, KV_HEADS, SIZE = 8, 2, 4
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}
RULES = Rules.shipped("hf-decoder", "hf-mlp", **SIZES)

pytestmark = pytest.mark.vllm


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=SIZE, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors as Megatron-core names and fuses them, from the model's attributes."""
    found = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight,
        "output_layer.weight": model.lm_head.weight,
        "decoder.final_layernorm.weight": model.model.norm.weight,
    }
    for number, layer in enumerate(model.model.layers):
        name, attention = f"decoder.layers.{number}", layer.self_attn
        heads = [one.weight.view(KV_HEADS, -1, 32) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
        found |= {
            f"{name}.self_attention.linear_qkv.weight": torch.cat(heads, 1).reshape(-1, 32),
            f"{name}.self_attention.linear_qkv.layer_norm_weight": layer.input_layernorm.weight,
            f"{name}.self_attention.q_layernorm.weight": attention.q_norm.weight,
            f"{name}.self_attention.k_layernorm.weight": attention.k_norm.weight,
            f"{name}.self_attention.linear_proj.weight": attention.o_proj.weight,
            f"{name}.mlp.linear_fc1.layer_norm_weight": layer.post_attention_layernorm.weight,
            f"{name}.mlp.linear_fc1.weight": torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            f"{name}.mlp.linear_fc2.weight": layer.mlp.down_proj.weight,
        }
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12).view(2, 6)).logits
    return found


def test_a_model_loads_and_an_export_equals_it(tmp_path: Path) -> None:
    model, other = build(0), build(1)
    bcp.save(tmp_path / "ours", {"model": trained(model)})
    model.config.save_pretrained(tmp_path / "config")
    report = bcp.load(tmp_path / "ours", {"model": other}, options=bcp.LoadOptions(rules=RULES))
    assert not report.missing
    assert torch.equal(logits(other), logits(model))

    third = build(2)
    third.load_state_dict(bcp.open(tmp_path / "ours", options=bcp.LoadOptions(rules=RULES)).state_dict())
    assert torch.equal(logits(third), logits(model))

    (tmp_path / "names.toml").write_text(RULES.to_toml())
    command = ["export", str(tmp_path / "ours"), str(tmp_path / "hub"), "--rules", str(tmp_path / "names.toml")]
    result = CliRunner().invoke(cli, [*command, "--config-from", str(tmp_path / "config")])
    assert result.exit_code == 0, result.output
    exported = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "hub").eval()
    assert torch.equal(logits(exported), logits(model))
