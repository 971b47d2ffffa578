"""Computed layouts match what vLLM's own loader does with real tensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from golden_layouts import ENGINES, GOLDEN, MODELS, file_of
from layout_replay import replay, replay_from_parts

from benchmarks.hub_shapes import hub_shapes
from benchmarks.layout_files import digest
from bytecheckpoint.errors import StateError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from vLLM's own modules
    import vllm
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8
    from vllm.model_executor.models import utils as models_utils
    from vllm.platforms import current_platform

    from benchmarks.vllm_layout import EngineRank, engine_model, layout_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # the warnings are vLLM's own
    pytest.mark.sampled(4, of=__name__),
]

_KERNEL_SELECTION = [
    (linear, "choose_scaled_mm_linear_kernel"),
    (fp8, "backend_to_kernel_cls"),
    (int8, "backend_to_kernel_cls"),
]

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "num_hidden_layers": 3, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
_DEEPSEEK = MODELS["deepseek-v3"] | _SIZES | _EXPERTS | {
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "num_nextn_predict_layers": 1,
}  # fmt: skip

_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    # Biases on query, key and value; the head is the embedding.
    "qwen2": _SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": _SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": MODELS["small-moe"] | {"num_experts": 4},
    "glm4_moe": MODELS["glm-4.5-air"] | _SIZES | _EXPERTS,
    "deepseek_v3": {key: value for key, value in _DEEPSEEK.items() if key != "quantization_config"},
    "deepseek_v3 in 8 bits": _DEEPSEEK | {
        "hidden_size": 512, "moe_intermediate_size": 256, "v_head_dim": 64, "qk_nope_head_dim": 64, "kv_lora_rank": 192,
        "qk_rope_head_dim": 64,
    },
}  # fmt: skip

_ENGINES = [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}]
_RANKS = [EngineRank(**engine, rank=rank) for engine in _ENGINES for rank in range(engine["tp"] * engine.get("pp", 1))]
_EXPERT_RANKS = [EngineRank(tp=2, ep=True, rank=rank) for rank in range(2)]
_CASES = [
    pytest.param(model, at, id=f"{model}-tp{at.tp}-pp{at.pp}{'-ep' if at.ep else ''}-rank{at.rank}")
    for model, config in _MODELS.items()
    for at in [*_RANKS, *(_EXPERT_RANKS if "moe_intermediate_size" in config else [])]
    # Blocks of 128 cannot be split over 4 ranks.
    if not ("8 bits" in model and at.tp == 4)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("configurations")
    for name, config in _MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in hub_shapes(config)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize(("model", "at"), _CASES)
@pytest.mark.sampled(4)
def test_a_layout_does_what_the_loader_does(folders: Path, model: str, at: EngineRank) -> None:
    weights = _weights(_MODELS[model])
    layout = layout_of(folders / model, at)
    with engine_model(folders / model, at, real=True) as built:
        built.load_weights(iter(weights.items()))
        expected = {name: parameter.detach() for name, parameter in built.named_parameters()}
    assert {tensor.name for tensor in layout.parameters} >= set(expected)
    for carry_out in (replay, replay_from_parts):
        found = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
        carry_out(layout, weights, found)
        for name, tensor in expected.items():
            unfilled = found[name].isnan()
            if "embed_tokens" in name or "lm_head" in name:  # padding, which the loader sets to zero
                assert not tensor[unfilled].any()
                found[name][unfilled] = 0
            else:
                assert not unfilled.any(), name
            assert torch.equal(_bits(found[name]), _bits(tensor)), name


def test_8_bit_layouts_do_not_depend_on_kernels(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without AMX, on which vLLM supports no 8-bit kernel, computes the same layout as one with AMX."""
    layouts = []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        before = [getattr(module, name) for module, name in _KERNEL_SELECTION]
        layouts.append(layout_of(folders / "deepseek_v3 in 8 bits", EngineRank(tp=2, rank=1)))
        assert [getattr(module, name) for module, name in _KERNEL_SELECTION] == before
    assert layouts[0] == layouts[1]
    # Without the stand-ins, vLLM finds no kernel on such a machine.
    supported = [kernel.is_supported()[0] for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum]]
    assert not any(supported)


def test_missing_layer_names_of_other_models_are_isolated(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM indexes layers on other pipeline stages by the model's id, and Python reuses ids."""
    known = models_utils._model_to_pp_missing_layer_names
    monkeypatch.setitem(known, 1, ["of a model that is gone"])
    before = dict(known)
    with engine_model(folders / "deepseek_v3", EngineRank(pp=2), real=True) as built:
        assert known == {}
        built.load_weights(iter(_weights(_MODELS["deepseek_v3"]).items()))
        assert known
    assert known == before


def test_a_state_in_transformers_memory_form(folders: Path) -> None:
    """Transformers fuses the experts of a layer into one tensor."""
    experts = 4
    at = EngineRank(tp=2, rank=1)
    weights = _weights(_MODELS["qwen3_moe"])
    memory = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(_MODELS["qwen3_moe"]["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        matrix = [
            {kind: weights[f"{prefix}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down")}
            for expert in range(experts)
        ]
        memory[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in matrix])
        memory[f"{prefix}.down_proj"] = torch.stack([one["down"] for one in matrix])
    stored = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in memory.items()]
    layout = layout_of(folders / "qwen3_moe", at, stored=stored)
    of_hub = layout_of(folders / "qwen3_moe", at)
    assert layout.sizes() == of_hub.sizes()
    found, expected = (
        {one.name: torch.zeros(one.shape, dtype=torch.bfloat16) for one in layout.parameters} for _ in "ab"
    )
    replay_from_parts(layout, memory, found)
    replay_from_parts(of_hub, weights, expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("model", ["small-dense", "small-moe"])
@pytest.mark.sampled(1)
def test_this_vllm_produces_the_golden_layouts(tmp_path: Path, model: str) -> None:
    index = json.loads((GOLDEN / "index.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    for engine in ENGINES[model]:
        golden = index[file_of(model, engine).name]
        if golden["vllm"] != vllm.__version__:
            pytest.skip(f"the golden files were made with vLLM {golden['vllm']}")
        for rank, expected in enumerate(golden["ranks"]):
            assert digest(layout_of(tmp_path, EngineRank(**engine, rank=rank))) == expected["digest"]


def test_layouts_that_cannot_be_computed(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rank 4 in an engine of tp=2 and pp=2"):
        EngineRank(tp=2, pp=2, rank=4)
    with pytest.raises(StateError, match=r"config\.json cannot be read"):
        layout_of(tmp_path, EngineRank())
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | {"architectures": ["Unknown"]}))
    with pytest.raises(StateError, match="stored tensors of architecture 'Unknown' cannot be derived"):
        layout_of(tmp_path, EngineRank())
    with engine_model(folders / "llama", EngineRank(tp=2)):
        with pytest.raises(StateError, match="an engine runs in this process"):
            layout_of(folders / "llama", EngineRank())
