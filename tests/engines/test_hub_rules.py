"""``hub_rules``: models whose experts transformers joins in memory load what is on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError

pytest.importorskip("peft")

import transformers

from bytecheckpoint.integrations.hub import hub_rules

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "DeepseekV3": {
        **_LATENT,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "Olmoe": {"num_experts": 4},
    "Jamba": {},
    "Glm4Moe": {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8},
}


def _model(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_KINDS[kind], pad_token_id=0, eos_token_id=1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_folder_of_save_pretrained_fills_a_model(tmp_path: Path, kind: str) -> None:
    saved, loaded = _model(kind, 1), _model(kind, 2)
    saved.save_pretrained(tmp_path / "hub")
    with pytest.raises(MismatchError, match="hub_rules"):
        bcp.load(tmp_path / "hub", {"model": loaded})
    rules = hub_rules(loaded)
    report = bcp.load(tmp_path / "hub", {"model": loaded}, options={"rules": rules})
    assert (report.missing, report.unexpected) == ([], [])
    expected = saved.state_dict()
    assert all(torch.equal(found, expected[name]) for name, found in loaded.state_dict().items())
    # The names in memory, as a checkpoint of a training job has them.
    bcp.save(tmp_path / "own", {"model": saved})
    again = _model(kind, 3)
    bcp.load(tmp_path / "own", {"model": again}, options={"rules": rules})
    assert all(torch.equal(found, expected[name]) for name, found in again.state_dict().items())


def test_the_rules_of_one_model() -> None:
    text = hub_rules(_model("Mixtral", 1).config.__class__(**_SIZES, architectures=["MixtralForCausalLM"])).to_toml()
    assert '"model.layers.{n0:int}.block_sparse_moe.experts.{e:int}.{part}.weight"' in text
    assert "parts    = { w1 = 48, w3 = 48 }" in text


def test_a_model_that_nothing_is_joined_in(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**_SIZES)
    saved, loaded = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "hub")
    bcp.load(tmp_path / "hub", {"model": loaded}, options={"rules": hub_rules(loaded)})
    assert all(torch.equal(one, loaded.state_dict()[name]) for name, one in saved.state_dict().items())
