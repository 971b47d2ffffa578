"""LoRA adapters pushed into vLLM itself: tokens are those of the adapter from disk, and of the model that it makes.
Needs vLLM (see CONTRIBUTING). Over HTTP and at two workers: see test_vllm_server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import vllm_loras
from vllm_loras import LONG, lora, merge_descriptions
from vllm_pushes import made, reference_tokens, results_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]


def _run(folder: Path, steps: list[Any], **engine: Any) -> list[Any]:
    made("llama", 0).save_pretrained(folder / "hf")
    job = {"engine": {"model": str(folder / "hf"), **engine}, "folder": str(folder), "steps": steps}
    return results_of(vllm_loras.__file__, json.dumps(job))


def _tokens(model_seed: int, lora_seed: int | None) -> list[list[int]]:
    model = made("llama", model_seed) if lora_seed is None else merge_descriptions(model_seed, lora_seed)
    return reference_tokens(model, LONG)


def test_tokens_after_each_push(tmp_path: Path) -> None:
    """With one slot, so that every other adapter that is asked for drops the one before."""
    steps: list[tuple[list[Any], Any]] = [(["generate"], _tokens(0, None))]
    for seed in (1, 2, 3):
        steps += [
            (["push", "policy", seed], None),
            (["generate", "policy"], _tokens(0, seed)),
            (["generate from disk", f"disk {seed}", seed], _tokens(0, seed)),
            (["generate", "policy"], _tokens(0, seed)),
            (["generate"], _tokens(0, None)),
        ]
    steps += [
        # What is not taken, and what fails half way, changes nothing.
        (["push", "policy", 4, "layers.1.self_attn.q_proj.lora_B"], "MismatchError"),
        (["fail next load"], [None]),
        (["push", "policy", 4], "EngineError"),
        (["generate", "policy"], _tokens(0, 3)),
        # One that vLLM has read from a file, which is there again when the first push fails.
        (["generate from disk", "second", 5], _tokens(0, 5)),
        (["fail next load"], [None]),
        (["push", "second", 6], "EngineError"),
        (["generate", "second"], _tokens(0, 5)),
        (["push", "second", 6], None),
        (["generate", "second"], _tokens(0, 6)),
        (["generate", "policy"], _tokens(0, 3)),
        # Of five adapters that were asked for, vLLM holds two.
        (["count known"], [2]),
        # Another base model.
        (["push base", 1], None),
        (["generate"], _tokens(1, None)),
        (["generate", "policy"], _tokens(1, 3)),
        (["generate", "second"], _tokens(1, 6)),
    ]
    found = _run(tmp_path, [step for step, _ in steps], max_loras=1, max_cpu_loras=2, block_size=32)
    nbytes = sum(tensor.nbytes for tensor in lora(1).values())
    for (step, requested), came in zip(steps, found, strict=True):
        if step[0] == "push":
            assert came.get("error") == requested, (step, came)
            assert requested or came == {"workers": [nbytes], "bytes": nbytes}
        else:
            assert came == requested, step
