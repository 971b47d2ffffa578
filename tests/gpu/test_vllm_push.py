"""Pushes into vLLM itself. The model is tiny and made here, so that nothing must be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_pushes import made, run_pushes

pytestmark = pytest.mark.gpu

_RING = 100_000  # bytes that a worker may use: a few chunks


def _run(folder: Path, seed: int, steps: list[Any], **options: Any) -> list[Any]:
    """Run the steps in an engine that starts with the model of ``seed``."""
    made("llama", seed).save_pretrained(folder)
    engine = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "worker_extension_cls": "vllm_fault.FaultyWorkers"}
    return run_pushes("llama", steps, model=str(folder), **engine, **options)


def test_tokens_and_digests(tmp_path: Path, device: torch.device) -> None:
    """Weights reach the memory that captured graphs use, and are those of an engine that starts with the model."""
    look: list[Any] = [["generate"], ["digest"]]
    steps = [*look, ["push", 1], *look, ["stream", 0, _RING], *look, ["push", 1], *look]
    graphs = {"enforce_eager": False, "compilation_config": {"mode": 0}} if device.type == "cuda" else {}
    found = _run(tmp_path / "first", 0, steps, **graphs)
    pushes = found[2::3]
    assert not [push["message"] for push in pushes if "error" in push]
    assert [push["mode"] for push in pushes] == ["double", "streamed", "double"]
    tokens, digests = found[0::3], found[1::3]
    assert tokens[0] == tokens[2] != tokens[1] == tokens[3]
    assert digests[0] == digests[2]
    assert digests[1] == digests[3] == _run(tmp_path / "second", 1, [["digest"]])[0]
