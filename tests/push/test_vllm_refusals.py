"""What of vLLM's engines is refused before anything is sent, and what a worker must not remember. No engine runs; needs
vLLM."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from torch import nn
from vllm_pushes import made

from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.push import DraftEngine, Pusher
from bytecheckpoint.inference.push.engines import Engine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those that vLLM's own modules give rise to
    from vllm.model_executor.models import utils as models_utils

    from bytecheckpoint.inference import vllm_layout, vllm_worker
    from bytecheckpoint.inference.push.learning import learn_parts
    from bytecheckpoint.inference.push.messages import Table
    from bytecheckpoint.inference.vllm_layout import EngineRank
    from bytecheckpoint.shards import basic_meta

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # the warnings are vLLM's own


class _Engine(Engine):
    """Of one worker, in this process."""

    name = "the engine"

    def __init__(self, vllm_config: Any, model: nn.Module) -> None:
        self.config, self._model = vllm_config, model

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [vllm_worker.answer(self.config, self._model, request)]

    def pause(self, timeout_s: float) -> None:
        raise AssertionError

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        raise AssertionError


@contextmanager
def _worker(folder: Path, kind: str, at: EngineRank) -> Iterator[_Engine]:
    made(kind, 0).save_pretrained(folder)
    vllm_config = vllm_layout._engine_config(folder, at)
    with vllm_layout._built(vllm_config, at, real=False) as built:
        yield _Engine(vllm_config, built)


def test_experts_that_move(tmp_path: Path) -> None:
    with _worker(tmp_path, "mixtral", EngineRank(tp=2, ep=True)) as engine, Pusher(engine) as pusher:
        engine.config.parallel_config.enable_eplb = True
        with pytest.raises(StateError, match=r"(?s)worker 0 of the engine.*--enable-eplb.*start it without"):
            pusher.push(made("mixtral", 1))


def test_the_draft_model_of_pipeline_stages(tmp_path: Path) -> None:
    with _worker(tmp_path, "llama", EngineRank(pp=2)) as engine, Pusher(DraftEngine(engine)) as pusher:
        with pytest.raises(StateError, match="has pipeline stages, of which the last alone has the draft model"):
            pusher.push(made("llama", 1))


def test_what_a_model_that_is_gone_left_to_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps it under the model's id, and ids are given again."""
    initialize = vllm_worker.initialize_model

    def with_an_id_that_is_known(**arguments: Any) -> nn.Module:
        model: nn.Module = initialize(**arguments)
        known = models_utils._model_to_pp_missing_layer_names
        known |= {id(layer): ["model.", "layers.", "lm_head."] for layer in model.modules()}
        return model

    monkeypatch.setattr(vllm_worker, "initialize_model", with_an_id_that_is_known)
    table = Table(
        tuple((name, basic_meta(one.dtype, one.shape)) for name, one in made("qwen3_moe", 0).state_dict().items())
    )
    with _worker(tmp_path, "qwen3_moe", EngineRank(pp=2, rank=1)) as engine:
        learned = learn_parts(vllm_worker.VllmModel(engine.config, engine._model), table)
    names = {part.name for part in learned.parts}
    assert names >= {name for name, _ in table.rows if name.startswith("model.layers.1.")}
    assert not [name for name in names if name.startswith("model.layers.0.")]
