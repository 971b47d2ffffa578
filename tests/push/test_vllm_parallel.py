"""vLLM engines of pipeline stages and of ranks with whole experts: started from our checkpoints, and pushed into. What
each worker computes with is compared with what it is where vLLM's own loader was given the weights, and tokens with
those of transformers. Over HTTP, and joins: see test_vllm_server. Needs vLLM (see CONTRIBUTING)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_loras import store
from vllm_pushes import made, reference_tokens, run_pushes

import bytecheckpoint as bcp

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]

_RING = 100_000  # bytes that a worker may take: a few chunks
_EXTENSION = {"worker_extension_cls": "vllm_fault.FaultyWorkers"}


def _own(folder: Path, kind: str, steps: list[Any], **engine: Any) -> list[Any]:
    """Of an engine that vLLM's own loader starts with the model of seed 0."""
    made(kind, 0).save_pretrained(folder / "hf")
    return run_pushes(kind, [["digest"], *steps], model=str(folder / "hf"), **_EXTENSION, **engine)


def _ours(folder: Path, kind: str, steps: list[Any], **engine: Any) -> list[Any]:
    """Of an engine that is started with it from our checkpoint."""
    bcp.save(folder / "checkpoint", {"model": made(kind, 0)})
    extra = {"path": str(folder / "checkpoint")}
    started = {"model": str(folder / "hf"), "load_format": "bcp", "model_loader_extra_config": extra}
    return run_pushes(kind, [["digest"], *steps], **started, **_EXTENSION, **engine)


def _check(folder: Path, kind: str, own: list[Any], missing: str, hole: str, longer: str, **engine: Any) -> list[Any]:
    """Versions one after another, with two that are refused and one that a worker fails to put in; the last is the one
    that the engine started with. ``hole`` is what an error calls that for which ``missing`` is. What came of steps that
    the engine does afterwards, which are ``engine["more"]``."""
    more = engine.pop("more", [])
    versions = [
        (["push", 1], 1), (["push", 2], 2), (["push without", 3, missing], 2), (["push longer", 3, longer], 2),
        (["fail next load", 1], 2), (["push", 3], 2), (["stream", 4, _RING], 4),
        (["stream by group", 1, _RING], 1), (["push", 0], 0),
    ]  # fmt: skip
    steps = [each for step, _ in versions for each in (step, ["generate"], ["digest"])]
    start, *found = _ours(folder, kind, [["generate"], *steps, *more], **engine)
    tokens = [reference_tokens(made(kind, seed)) for seed in range(5)]
    assert found.pop(0) == tokens[0]
    came, generated, looks = (found[place : len(steps) : 3] for place in range(3))
    assert generated == [tokens[served] for _, served in versions]
    seen = {0: start}
    for look, (_, served) in zip(looks, versions, strict=True):
        assert look == seen.setdefault(served, look)
    assert start == own
    for served in (1, 2, 4):
        for before, after in zip(start, seen[served], strict=True):
            assert not [name for name in before if before[name] == after[name] and not _stays(name, after[name])]
    _, _, without, too_long, _, broken, *_ = came
    failed = [(without, hole, "Mismatch"), (too_long, longer, "Mismatch"), (broken, "serves version 2", "Engine")]
    for push, text, error in failed:
        assert push["error"] == f"{error}Error"
        assert re.search(rf"(?s)^worker 1 of .*{re.escape(text)}", push["message"]), push
    for (step, _), push in zip(versions, came, strict=True):
        if step[0] in ("push", "stream", "stream by group") and push is not broken:
            assert push["mode"] == ("double" if step[0] == "push" else "streamed"), push
            assert all(requested < 0.8 * push["bytes"] for requested, _ in push["workers"])
    return found[len(steps) :]


def _stays(name: str, digest: str) -> bool:
    """Return whether it is in all versions, or was packed and released."""
    return digest.endswith("(0,)") or any(
        part in name for part in ("norm", "cos_sin_cache", "bias", "lora", "scale", "_map")
    )


def test_pipeline_stages(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    """The embedding, which is the head too, is on both; an adapter may be on one alone."""
    layout = {"pipeline_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    adapters = [store(tmp_path, 1), store(tmp_path, 2, [1])]
    steps = [step for path in adapters for step in (["adapter", path], ["digest"])]
    own, _, whole, _, part = _own(tmp_path, "qwen2", steps, **layout)
    pushes = [["push adapter", 1, None], ["push adapter", 2, [1]]]
    more = [step for push in pushes for step in (push, ["adapter", "/nowhere"], ["digest"])]
    more.append(["push adapter", 3, None, "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight"])
    missing, longer = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
    hole = "model.layers.1.self_attn.qkv_proj"
    found = _check(tmp_path, "qwen2", own, missing, hole, longer, more=more, **layout)
    assert "the engine's model has no module model.layers.2.mlp.up_proj that can have LoRA" in found.pop()["message"]
    assert found[2::3] == [whole, part]
    assert min(found[0]) > 0
    assert found[3][0] == 0 < found[3][1]


def test_ranks_with_whole_experts(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    layout = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    (own,) = _own(tmp_path, "mixtral", [], **layout)
    expert = "model.layers.1.block_sparse_moe.experts.3"
    hole = "model.layers.1.block_sparse_moe.experts"
    _check(tmp_path, "mixtral", own, f"{expert}.w1.weight", hole, f"{expert}.w2.weight", **layout)


def test_adapters_of_experts(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    """What is in slots is what vLLM puts there from a file. No tokens: vLLM computes with them by Triton alone."""
    layout = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    layout |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    steps = [["adapter", store(tmp_path, seed, kind="mixtral")] for seed in (1, 2)]
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_B.weight"
    steps += [["push adapter", 1, None], ["adapter", "/nowhere"], ["push adapter", 2, None, name]]
    steps += [["push adapter", 2, None], ["push", 1], ["push", 0], ["adapter", "/nowhere"]]
    own, *found = _own(tmp_path, "mixtral", [each for step in steps for each in (step, ["digest"])], **layout)
    looks = found[1::2]
    assert [looks.index(look) for look in looks] == [0, 1, 0, 0, 0, 1, 6, 1, 1]
    assert own not in looks[:2]
    assert min(found[4]) == max(found[4]) > 0
    text = rf"(?s)^worker 0 of .*{name}: shape \[129, 4\], but rank 4 and the engine's layer require \[128, 4\]"
    assert re.search(text, found[8]["message"])
    assert "error" not in found[12]
