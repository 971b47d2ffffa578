"""Exports that transformers loads: complete, with bit-equal logits, also of models with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
_KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
_EXPERT = {
    "Mixtral": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
    "Qwen3Moe": "model.layers.1.mlp.experts.2.gate_proj.weight",
}


def _bcp(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def _model(kind: str) -> Any:
    import transformers

    torch.manual_seed(5)
    if kind == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)).eval()
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**_SIZES, **_KINDS[kind])
    ).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12)).logits


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.sampled(3)
def test_exports_load_with_equal_logits(tmp_path: Path, kind: str) -> None:
    """In memory, the experts of a layer are one tensor; in the export, each has its own, as on the hub."""
    from transformers import AutoModelForCausalLM

    model = _model(kind)
    model.save_pretrained(tmp_path / "hf")
    bcp.save(tmp_path / "own", {"model": model})
    own, hf, out = tmp_path / "own", tmp_path / "hf", tmp_path / "out"
    ran = _bcp("export", own, out, "--config-from", hf, "--max-file-size", "60KB")
    assert ran.exit_code == 0, ran.output
    assert "complete according to config.json" in ran.output
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()), _logits(model))
    assert _bcp("diff", tmp_path / "hf", tmp_path / "out").exit_code == 0, "names and bits of save_pretrained"
    # From the import, with the configuration that it kept.
    assert _bcp("import", tmp_path / "out", tmp_path / "imported").exit_code == 0
    assert _bcp("export", tmp_path / "imported", tmp_path / "again").exit_code == 0
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()), _logits(model))


def test_a_configuration_with_an_infinite_number(tmp_path: Path) -> None:
    """transformers writes an infinite number as an object."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "num_hidden_layers": 1}
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, vocab_size=64, n_groups=1))
    model.save_pretrained(tmp_path / "hf")
    assert "__float__" in (tmp_path / "hf" / "config.json").read_text()
    bcp.save(tmp_path / "own", {"model": model})
    ran = _bcp("export", tmp_path / "own", tmp_path / "out", "--config-from", tmp_path / "hf")
    assert ran.exit_code == 0, ran.output
    assert "complete according to config.json" in ran.output
    assert Mamba2Config.from_pretrained(tmp_path / "out").time_step_limit[1] == float("inf")


@pytest.mark.parametrize("kind", _EXPERT)
@pytest.mark.parametrize("source", ["own", "hf"])
@pytest.mark.sampled(2)
def test_a_missing_expert_is_named(tmp_path: Path, kind: str, source: str) -> None:
    model = _model(kind)
    model.save_pretrained(tmp_path / "hf")
    bcp.save(tmp_path / "own", {"model": model})
    export = ("export", tmp_path / source, tmp_path / "out", "--config-from", tmp_path / "hf")
    ran = _bcp(*export, "--exclude", _EXPERT[kind])
    assert ran.exit_code == 1
    assert f"missing: 1\n    {_EXPERT[kind]}" in ran.output
    assert not (tmp_path / "out").exists()
    assert _bcp(*export, "--exclude", _EXPERT[kind], "--partial").exit_code == 0
    assert f"model.{_EXPERT[kind]}" not in bcp.open(tmp_path / "out")


def test_the_models_lists_of_names_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model's class calls ignorable may be there or missing; anything else may not."""
    from transformers import LlamaForCausalLM

    model = _model("Llama")
    model.save_pretrained(tmp_path / "hf")
    state = dict(model.state_dict())
    state["model.layers.0.self_attn.old_bias"] = torch.zeros(2)
    del state["lm_head.weight"], state["model.norm.weight"]
    bcp.save(tmp_path / "own", {"model": state})
    export = ("export", tmp_path / "own", tmp_path / "out", "--config-from", tmp_path / "hf")
    ran = _bcp(*export)
    assert ran.exit_code == 1
    assert "model.norm.weight" in ran.output
    assert "old_bias" in ran.output
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"norm\.weight"])
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"self_attn\.old_"])
    assert _bcp(*export).exit_code == 0


def _adapted(kind: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(6)
    model = get_peft_model(_model(kind), LoraConfig(r=4, lora_alpha=6, **options))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:  # PEFT begins with zeros
                param.copy_(torch.randn(param.shape) * 0.2)
    return model.eval()


_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "matrices": ("Llama", {"target_modules": ["q_proj", "down_proj"], "alpha_pattern": {"q_proj": 3}}),
    "whole module": ("Llama", {"target_modules": ["v_proj"], "modules_to_save": ["norm"], "use_rslora": True}),
    "turned": ("GPT2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "embedding": ("GPT2", {"target_modules": ["wpe", "c_proj"], "rank_pattern": {"wpe": 2}, "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", _ADAPTERS)
@pytest.mark.sampled(2)
def test_adapters_as_peft_merges_and_stores_them(tmp_path: Path, case: str) -> None:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    kind, options = _ADAPTERS[case]
    model = _adapted(kind, **options)
    _model(kind).save_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "adapter")
    bcp.save(tmp_path / "own", {"model": model})
    ran = _bcp("export", tmp_path / "own", tmp_path / "merged", "--lora", "merge", "--config-from", tmp_path / "hf")
    assert ran.exit_code == 0, ran.output
    assert "complete according to config.json" in ran.output
    ran = _bcp("export", tmp_path / "own", tmp_path / "peft", "--lora", "peft")
    assert ran.exit_code == 0, ran.output
    again = PeftModel.from_pretrained(_model(kind), tmp_path / "peft").eval()
    stored = get_peft_model_state_dict(model)
    assert all(torch.equal(value, stored[name]) for name, value in get_peft_model_state_dict(again).items())
    assert torch.equal(_logits(again), _logits(model))
    assert set(bcp.open(tmp_path / "peft")) == set(bcp.open(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval().state_dict()
    expected = model.merge_and_unload().state_dict()
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=1e-6, msg=name)
