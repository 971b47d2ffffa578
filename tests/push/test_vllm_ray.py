"""Pushes into a vLLM engine inside a Ray actor. Needs vLLM and Ray, which CI does not have: it was last run by hand
with Ray 2.60."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytest.importorskip("transformers")

import ray
from vllm_pushes import ENVIRONMENT, PROMPTS, made, reference_tokens

from bytecheckpoint.inference.push import Pusher, RpcEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.sampled(1, of="engines of vLLM"),
    pytest.mark.filterwarnings("ignore"),
]  # the warnings are Ray's own


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Any]:
    from vllm import LLM

    made("llama", 0).save_pretrained(tmp_path)
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": ENVIRONMENT})
    try:
        yield ray.remote(num_cpus=1)(LLM).remote(
            model=str(tmp_path), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
            worker_extension_cls="vllm_fault.FaultyWorkers",
        )  # fmt: skip
    finally:
        ray.shutdown()


def test_an_actor(actor: Any) -> None:
    def call(method: str, *arguments: Any, **options: Any) -> Any:
        return ray.get(getattr(actor, method).remote(*arguments, **options))

    from vllm import SamplingParams

    engine = RpcEngine(call, name="the actor")
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    with Pusher(engine, deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 1), version=1)
    found = call("generate", prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [list(one.outputs[0].token_ids) for one in found] == reference_tokens(made("llama", 1))
    assert call("get_weight_version") == "1"
