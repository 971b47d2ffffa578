"""Pushes into an ``AsyncLLM`` of the sender's process, of two data-parallel replicas. Needs vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import vllm_pushes
from vllm_pushes import made, reference_tokens, results_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(1, of="engines of vLLM")]


def _serves(seed: int) -> list[Any]:
    return [[reference_tokens(made("llama", seed))] * 2, str(seed), False]


def test_it_generates_meanwhile(tmp_path: Path) -> None:
    """It starts an engine, which takes long."""
    made("llama", 0).save_pretrained(tmp_path)
    script = Path(vllm_pushes.__file__).with_name("vllm_async.py")
    waited, kept, failed, aborted, blocked = results_of(str(script), str(tmp_path))
    assert waited == ["", 50, *_serves(1)]
    assert kept == ["", *_serves(2)]
    assert "the layer does not fit" in failed[0]
    assert failed[1:] == _serves(2)
    assert aborted == ["", *_serves(4)]
    assert blocked.startswith("UsageError: a push blocks the event loop")
