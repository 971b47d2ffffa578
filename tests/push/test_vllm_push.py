"""Pushes into vLLM itself: after each, the tokens of the model that was pushed. Needs vLLM (see CONTRIBUTING)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_pushes import made, reference_tokens, run_pushes

import bytecheckpoint as bcp

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_RING = 100_000  # bytes that a worker may take: a few chunks
_EXTENSION = {"worker_extension_cls": "vllm_fault.FaultyWorkers"}


def _run(folder: Path, kind: str, steps: list[Any], **engine: Any) -> list[Any]:
    """An engine that starts with the model of seed 0."""
    made(kind, 0).save_pretrained(folder)
    return run_pushes(kind, steps, model=str(folder), **engine)


@pytest.mark.parametrize(
    ("kind", "tp", "pushes"), [("llama", 1, 10), ("llama", 2, 3), ("qwen2", 1, 3), ("mixtral", 2, 3)]
)
@pytest.mark.sampled(1)
def test_tokens_after_each_push(tmp_path: Path, kind: str, tp: int, pushes: int) -> None:
    """It starts an engine, which takes long."""
    steps: list[Any] = [["generate"]]
    for seed in range(1, pushes + 1):
        steps += [["push", seed], ["generate"]]
    steps += [["replayed"], ["generate"]]
    steps += [["stream", pushes + 1, _RING], ["generate"], ["stream by group", pushes + 2, _RING], ["generate"]]
    # With LoRA, layers have other names; the tied head must still be found.
    lora = {"enable_lora": True, "max_lora_rank": 8} if kind == "qwen2" else {}
    found = _run(tmp_path / "hf", kind, steps, tensor_parallel_size=tp, **_EXTENSION, **lora)
    at = steps.index(["replayed"])
    (replayed, again), found = found[at : at + 2], found[:at] + found[at + 2 :]
    assert again == found[at - 1]
    # The loader pads embeddings and heads, of two workers those of the last; every other layer is only copied into.
    heads = {"lm_head.weight", "model.embed_tokens.weight"} if kind != "qwen2" else {"model.embed_tokens.weight"}
    assert replayed == [*[[15, []]] * (tp - 1), [13, sorted(heads)]]
    assert not [push["message"] for push in found[1::2] if "error" in push]
    assert found[::2] == [reference_tokens(made(kind, seed)) for seed in range(pushes + 3)]
    nbytes = sum(parameter.nbytes for parameter in made(kind, 0).parameters())  # a tied tensor is sent once
    for seed, push in enumerate(found[1::2], 1):
        streamed = seed > pushes
        assert push["mode"] == ("streamed" if streamed else "double")
        assert [served[:3] for served in push["served"]] == [[seed, "", not streamed]] * tp
        for requested, _ in push["workers"]:
            assert requested <= nbytes * (1.1 / tp)
            assert requested > 2 * _RING
    # Layers that are padded are put in at the end, whenever their tensors come.
    for push in found[-4::2]:
        assert max(push["set aside"]) <= 2 * 260 * 128 * 4, push


def test_failures_leave_the_old_version(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    name = "model.layers.1.self_attn.q_proj.weight"
    steps: list[Any] = [
        ["push without", 1, name], ["generate"],
        ["fail next load", 1], ["push", 1], ["generate"],
        ["push", 2], ["generate"],
        ["push without", 3, name], ["generate"],
        ["fail next load", 1], ["push", 3], ["generate"],
        ["push", 3], ["generate"],
        ["push nan", 4, name], ["generate"], ["push", 5], ["generate"],
    ]  # fmt: skip
    found = _run(tmp_path / "hf", "llama", steps, tensor_parallel_size=2, **_EXTENSION)
    tokens = [reference_tokens(made("llama", seed)) for seed in range(6)]
    # After 13, values that are not finite were allowed. They leave nothing in the caches.
    assert [found[at] for at in (1, 4, 6, 8, 11, 13, 17)] == [tokens[seed] for seed in (0, 0, 2, 2, 2, 3, 5)]
    for missing in (found[0], found[7]):
        assert missing["error"] == "MismatchError"
        assert "model.layers.1.self_attn.qkv_proj.weight" in missing["message"]
    for broken in (found[3], found[10]):
        assert broken["error"] == "EngineError"
        assert "the layer does not fit" in broken["message"]
        assert "worker 1 of" in broken["message"]
    assert "serves what it started with" in found[3]["message"]
    assert "serves version 2" in found[10]["message"]


@pytest.mark.sampled(1, of="engines of vLLM")
def test_reloads_and_sleep_between_pushes(tmp_path: Path) -> None:
    """From a checkpoint, which a reload and the rollback of the first push read again. On CPUs, vLLM only pretends to
    sleep."""
    bcp.save(tmp_path / "c", {"model": made("llama", 0)})
    steps: list[Any] = [
        ["fail next load", 1], ["push", 1], ["generate"],
        ["reload"], ["generate"],
        ["push", 1], ["generate"],
        ["sleep"], ["wake up", ["weights"]], ["reload"], ["wake up", ["kv_cache"]], ["generate"],
        ["push", 2], ["generate"],
        ["sleep"], ["wake up", ["weights"]], ["push", 3], ["wake up", ["kv_cache"]], ["generate"],
        ["sleep", 1], ["wake up", None], ["generate"], ["sleep", 1], ["wake up", None], ["push", 1], ["generate"],
        ["stream", 2, 1 << 20], ["reload"], ["served"], ["generate"], ["push", 2], ["generate"],
    ]  # fmt: skip
    options = {"path": str(tmp_path / "c")}
    loader = {"load_format": "bcp", "model_loader_extra_config": options, "tensor_parallel_size": 2}
    found = _run(tmp_path / "hf", "llama", steps, **loader, **_EXTENSION)
    assert "serves what it started with" in found[1]["message"]
    tokens = [found[number] for number, step in enumerate(steps) if step == ["generate"]]
    assert tokens == [reference_tokens(made("llama", seed)) for seed in (0, 0, 1, 0, 2, 3, 3, 1, 0, 2)]
    assert [served[0] for served in found[steps.index(["served"])]] == [None, None]
    assert not [result for result in found[2:] if isinstance(result, dict) and "error" in result]


@pytest.mark.sampled(1, of="engines of vLLM")
def test_its_draft_model(tmp_path: Path) -> None:
    """At two workers, see test_vllm_server. A draft model is no good but for the tokens of its own weights."""
    steps: list[Any] = []
    for seed in (1, 2, 3):
        steps += [["push", seed], ["generate"], ["vllm's version"]]
    steps += [["drafted"], ["push draft", 3], ["generate"], ["drafted"], ["vllm's version"]]
    steps += [["push draft", 4], ["generate"], ["drafted"]]
    made("llama", 5).save_pretrained(tmp_path / "draft")
    draft = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    config = {"speculative_config": draft, "disable_log_stats": False, **_EXTENSION}
    found = _run(tmp_path / "hf", "llama", steps, **config)
    tokens = [reference_tokens(made("llama", seed)) for seed in (1, 2, 3)]
    assert found[1:9:3] == tokens
    assert found[2:9:3] == ["1", "2", "3"]
    (_, accepted), pushed, after, (proposed, all_accepted), version = found[9:14]
    assert accepted < 10
    assert [served[:3] for served in pushed["served"]] == [[3, "", True]]
    assert after == tokens[2]
    assert 0 < proposed == all_accepted
    assert version == "3"
    other, last, (proposed, accepted) = found[14:]
    assert "error" not in other
    assert last == tokens[2]
    assert accepted < proposed
