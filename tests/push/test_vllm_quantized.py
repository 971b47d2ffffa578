"""Wide weights into vLLM's models that have them in 8 bits with scales for blocks. Needs vLLM."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from toy_blocks import reference
from vllm_pushes import made, run_pushes

from benchmarks.hub_shapes import StoredTensor, hub_shapes
from bytecheckpoint.errors import MismatchError
from bytecheckpoint.inference.layouts.recording import Recorder, UnrecordedWrites, uncovered
from bytecheckpoint.inference.push.engine_model import record_load
from bytecheckpoint.inference.push.engines.base import Budget, Engine
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.inference.push.requests import request_tensors
from bytecheckpoint.tensors.shards import basic_meta

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those that vLLM's own modules give rise to
    from benchmarks import vllm_layout
    from benchmarks.vllm_layout import EngineRank
    from bytecheckpoint.inference.vllm.model import VllmModel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # the warnings are vLLM's own
    pytest.mark.sampled(2, of=__name__),
]

# As published checkpoints have it: the routers of experts are not quantised.
_FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(3)],
}  # fmt: skip
_SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 260, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "attention_bias": False,
}  # fmt: skip
_QWEN3_MOE = _SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "norm_topk_prob": True, "moe_intermediate_size": 256, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v3": _SIZES | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
        "hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "q_lora_rank": 128, "kv_lora_rank": 192, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "num_nextn_predict_layers": 0,
    },
}  # fmt: skip
_RANKS = [EngineRank(), *(EngineRank(tp=2, rank=rank) for rank in range(2))]


class _Engine(Engine):
    """Of one worker, in this process."""

    name = "the engine"

    def __init__(self, model: VllmModel) -> None:
        self._receiver = Receiver(model)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [self._receiver.answer(request)]

    def pause(self, timeout_s: float) -> None:
        raise AssertionError

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        raise AssertionError


@contextmanager
def _rehearsal(folder: Path, config: dict[str, Any], at: EngineRank) -> Iterator[VllmModel]:
    folder.joinpath("config.json").write_text(json.dumps(config))
    vllm_config = vllm_layout._engine_config(folder, at)
    with vllm_layout._built(vllm_config, at, real=False) as built:
        yield VllmModel(vllm_config, built)


def _table(stored: list[StoredTensor]) -> Table:
    return Table(tuple((name, basic_meta(dtype, shape)) for name, shape, dtype in stored))


def _uncovered(model: VllmModel, table: Table) -> list[str]:
    """Parameters with elements that get nothing, but for scales of attention, which vLLM gives values itself."""
    recorder = Recorder(lambda name, view: torch.zeros(view.shape))
    built = model.make()
    with torch.no_grad(), UnrecordedWrites() as own:
        model.run_loader(built, recorder.tensors(table.metas()))
    holes = uncovered(built.named_parameters(), recorder.copies, own.targets)
    return [name for name, _ in holes if not re.search(r"attn\.(q|k|v|prob)_scale$", name)]


@pytest.mark.parametrize("at", _RANKS, ids=lambda at: f"tp{at.tp}-rank{at.rank}")
@pytest.mark.parametrize("kind", list(_MODELS))
@pytest.mark.sampled(2)
def test_requests_match_a_quantized_checkpoint(tmp_path: Path, kind: str, at: EngineRank) -> None:
    wide = _MODELS[kind]
    quantized = wide | {"quantization_config": _FP8}
    with _rehearsal(tmp_path, quantized, at) as model:
        assert model.blocks == (128, 128)
        request = request_tensors(_Engine(model), _table(hub_shapes(wide)), Budget(60), strict=at.tp == 1)
        assert dict(request.table.rows) == dict(_table(hub_shapes(quantized)).rows)
        assert set(request.parts[0]) == set(record_load(model, _table(hub_shapes(quantized))).parts)
        assert not _uncovered(model, request.table)


@pytest.mark.parametrize("at", _RANKS, ids=lambda at: f"tp{at.tp}-rank{at.rank}")
@pytest.mark.sampled(1)
def test_experts_as_transformers_has_them(tmp_path: Path, at: EngineRank) -> None:
    """Those of a layer as one tensor, whose blocks are cut with it."""
    state = made("qwen3_moe", 0).state_dict()
    table = _table([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()])
    made("qwen3_moe", 0).config.save_pretrained(tmp_path)
    config = json.loads(tmp_path.joinpath("config.json").read_text()) | {"quantization_config": _FP8}
    config |= {"architectures": ["Qwen3MoeForCausalLM"]}
    with _rehearsal(tmp_path, config, at) as model:
        request = request_tensors(_Engine(model), table, Budget(60), strict=at.tp == 1)
        name = "model.layers.1.mlp.experts.gate_up_proj"
        assert dict(request.table.rows)[f"{name}_scale_inv"] == basic_meta(torch.float32, (4, 4, 2))
        assert not _uncovered(model, request.table)


def test_experts_that_share_blocks(tmp_path: Path) -> None:
    stored = [
        ("model.layers.1.mlp.experts.gate_up_proj", (4, 2 * 192, 256), torch.bfloat16),
        ("model.layers.1.mlp.experts.down_proj", (4, 256, 192), torch.bfloat16),
    ]
    config = _QWEN3_MOE | {"moe_intermediate_size": 192, "quantization_config": _FP8}
    with _rehearsal(tmp_path, config, EngineRank()) as model:
        with pytest.raises(MismatchError, match="no block has elements of two of them"):
            request_tensors(_Engine(model), _table(stored), Budget(60), strict=False)


def test_what_is_not_to_be_quantised_is_not(tmp_path: Path) -> None:
    without = {"modules_to_not_convert": [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]}
    config = _MODELS["qwen3"] | {"quantization_config": _FP8 | without}
    with _rehearsal(tmp_path, config, EngineRank()) as model:
        request = request_tensors(_Engine(model), _table(hub_shapes(_MODELS["qwen3"])), Budget(60), strict=True)
        assert not any("down_proj" in name for name in request.blocks)
        assert len(request.blocks) == 2 * 6
        assert not _uncovered(model, request.table)


def test_scales_of_whole_tensors_are_refused(tmp_path: Path) -> None:
    whole = {key: value for key, value in _FP8.items() if key != "weight_block_size"}
    with _rehearsal(tmp_path, _MODELS["qwen3"] | {"quantization_config": whole}, EngineRank()) as model:
        with pytest.raises(MismatchError, match="has no scales for its blocks"):
            request_tensors(_Engine(model), _table(hub_shapes(_MODELS["qwen3"])), Budget(60), strict=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="runs an 8-bit kernel, which vLLM has only for CPUs with AMX"
)
@pytest.mark.sampled(1, of="engines of vLLM")
def test_a_push_is_as_loading_a_quantised_checkpoint(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    """Started from one of seed 1: a push of seed 2 changes everything, and one of seed 1 gives what was loaded."""
    _quantized_checkpoint(tmp_path)
    # No tokens: in bfloat16, vLLM's attention on CPUs (0.32) now and then ends its process with an illegal instruction.
    steps: list[Any] = [["digest"], ["push", 2], ["digest"], ["push", 1], ["digest"]]
    found = run_pushes(
        "qwen3_moe", steps, model=str(tmp_path), dtype="bfloat16", worker_extension_cls="vllm_fault.FaultyWorkers"
    )
    digests, pushes = found[0::2], found[1::2]
    assert not [push["message"] for push in pushes if "error" in push]
    assert digests[0] == digests[2] != digests[1]
    for push in pushes:
        assert push["workers"][0][0] < 0.7 * push["bytes"]


def _quantized_checkpoint(folder: Path) -> None:
    model = made("qwen3_moe", 1)
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = reference(tensor, (128, 128))
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": _FP8}))
