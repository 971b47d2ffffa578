"""Models as transformers holds them in memory, under the names and in the shapes of the hub. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_blocks import reference

from bytecheckpoint.inference.layouts.hub_names import hub_tensors
from bytecheckpoint.inference.layouts.recording import Recorder

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.vllm

_SIZES = {"vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 4, "intermediate_size": 128}
_CONFIGS = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
}


def _no_values(name: str, view: object) -> torch.Tensor:
    raise AssertionError(f"values of {name} were asked for")


def _model(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_CONFIGS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", list(_CONFIGS))
def test_as_what_transformers_writes(tmp_path: Path, kind: str) -> None:
    model = _model(kind)
    model.save_pretrained(tmp_path)
    written = safetensors.load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    metas = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    found: Any = hub_tensors(model.config, dict(Recorder(_no_values).tensors(metas)))
    assert set(found) == set(written)
    for name, tensor in found.items():
        view = tensor.strided
        assert torch.equal(state[tensor.fqn].as_strided(view.shape, view.strides, view.offset), written[name]), name


def test_what_is_of_the_hub_already_stays(tmp_path: Path) -> None:
    model = _model("Qwen3Moe")
    model.save_pretrained(tmp_path)
    written = safetensors.load_file(tmp_path / "model.safetensors")
    assert hub_tensors(model.config, written) is written
    assert hub_tensors(object(), written) is written


def test_scales_go_with_their_weights(tmp_path: Path) -> None:
    blocks = (16, 16)
    model = _model("Qwen3Moe")
    model.save_pretrained(tmp_path)
    written = safetensors.load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    state |= {f"{name}_scale_inv": reference(state[name], blocks)[1] for name in list(state) if "proj" in name}
    metas = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    found: Any = hub_tensors(model.config, dict(Recorder(_no_values).tensors(metas)))
    scales = {name: tensor for name, tensor in found.items() if name.endswith("_scale_inv")}
    assert set(found) - set(scales) == set(written)
    assert set(scales) == {f"{name}_scale_inv" for name in written if "proj" in name}
    for name, tensor in scales.items():
        view = tensor.strided
        expected = reference(written[name.removesuffix("_scale_inv")], blocks)[1]
        assert torch.equal(state[tensor.fqn].as_strided(view.shape, view.strides, view.offset), expected), name
