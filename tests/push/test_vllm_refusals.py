"""What of vLLM's engines is refused before anything is sent, and what a worker must not remember. No engine runs; needs
vLLM."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from torch import nn
from vllm_pushes import made

from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.push import DraftEngine, Pusher
from bytecheckpoint.inference.push.engines.base import Engine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those that vLLM's own modules give rise to
    from vllm.model_executor.models import utils as models_utils

    from benchmarks import vllm_layout
    from benchmarks.hub_shapes import hub_shapes
    from benchmarks.vllm_layout import EngineRank
    from bytecheckpoint.inference.push.engine_model import record_load
    from bytecheckpoint.inference.push.messages import Table
    from bytecheckpoint.inference.vllm import model as vllm_model
    from bytecheckpoint.inference.vllm import worker as vllm_worker
    from bytecheckpoint.tensors.shards import basic_meta

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # the warnings are vLLM's own
    pytest.mark.sampled(2, of=__name__),
]

_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 128,
    "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 260,
    "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 128,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "num_nextn_predict_layers": 0,
}  # fmt: skip


class _Engine(Engine):
    """Of one worker, in this process."""

    name = "the engine"

    def __init__(self, vllm_config: Any, model: nn.Module) -> None:
        self.config, self._model = vllm_config, model
        self.runner: Any = None

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [vllm_worker.answer(self.config, self._model, request, self.runner)]

    def pause(self, timeout_s: float) -> None:
        raise AssertionError

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        raise AssertionError


@contextmanager
def _worker(folder: Path, at: EngineRank) -> Iterator[_Engine]:
    vllm_config = vllm_layout._engine_config(folder, at)
    with vllm_layout._built(vllm_config, at, real=False) as built:
        yield _Engine(vllm_config, built)


def test_experts_that_move(tmp_path: Path) -> None:
    made("mixtral", 0).save_pretrained(tmp_path)
    with _worker(tmp_path, EngineRank(tp=2, ep=True)) as engine, Pusher(engine) as pusher:
        engine.config.parallel_config.enable_eplb = True
        with pytest.raises(StateError, match=r"(?s)worker 0 of the engine.*--enable-eplb.*start it without"):
            pusher.push(made("mixtral", 1))


def test_replicas_of_which_a_worker_does_not_know_the_number(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path)
    with _worker(tmp_path, EngineRank()) as engine, Pusher(engine) as pusher:
        engine.config.parallel_config.data_parallel_hybrid_lb = True
        with pytest.raises(StateError, match="--data-parallel-external-lb"):
            pusher.push(made("llama", 1))


def test_the_draft_model_of_pipeline_stages(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path)
    with _worker(tmp_path, EngineRank(pp=2)) as engine, Pusher(DraftEngine(engine)) as pusher:
        with pytest.raises(StateError, match="without pipeline stages"):
            pusher.push(made("llama", 1))


def test_the_draft_model_of_vllms_newer_model_runner(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path)
    with _worker(tmp_path, EngineRank()) as engine, Pusher(DraftEngine(engine)) as pusher:
        engine.runner = SimpleNamespace(speculator=object())
        with pytest.raises(StateError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            pusher.push(made("llama", 1))


def test_what_a_model_that_is_gone_left_to_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps it under the model's id, and ids are given again."""
    initialize = vllm_model.initialize_model

    def with_an_id_that_is_known(**arguments: Any) -> nn.Module:
        model: nn.Module = initialize(**arguments)
        known = models_utils._model_to_pp_missing_layer_names
        known |= {id(layer): ["model.", "layers.", "lm_head."] for layer in model.modules()}
        return model

    monkeypatch.setattr(vllm_model, "initialize_model", with_an_id_that_is_known)
    tmp_path.joinpath("config.json").write_text(json.dumps(_DEEPSEEK))  # whose loader still looks there
    table = Table(tuple((name, basic_meta(dtype, shape)) for name, shape, dtype in hub_shapes(_DEEPSEEK)))
    with _worker(tmp_path, EngineRank(pp=2, rank=1)) as engine:
        learned = record_load(vllm_model.VllmModel(engine.config, engine._model), table)
    names = {part.name for part in learned.parts}
    assert names >= {name for name, _ in table.rows if name.startswith("model.layers.1.")}
    assert not [name for name in names if name.startswith("model.layers.0.")]
