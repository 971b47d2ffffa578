"""Run the blocks of how-to pages that need transformers, PEFT (with a small Llama in place of the named one) or
TensorBoard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"tests/engines/test_how_to_pages.py runs this -->\n```python\n(.*?)^```", re.M | re.S)


def llama() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    path = PAGES / page
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    for code in blocks:
        exec(compile(code, str(path), "exec"), names)
    return names


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(8)[None]).logits
    return result


def test_a_run_with_an_adapter_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def job(steps: int) -> dict[str, Any]:
        def train_step() -> None:
            names["optimizer"].zero_grad()
            names["model"](torch.arange(8)[None]).logits.square().mean().backward()
            names["optimizer"].step()

        names: dict[str, Any] = {"bcp": bcp, "torch": torch, "base": llama(), "steps": steps, "train_step": train_step}
        return run("lora.md", names)

    first, second = job(100), job(100)
    assert second["state"]["extra_state"]["step"] == 100
    assert sum("lora_" in name for name in bcp.open("runs/lora/step-100")) == len(list(bcp.open("runs/lora/step-100")))
    assert second["report"].left_out
    torch.testing.assert_close(logits(second["model"]), logits(first["model"]), rtol=0, atol=0)


def test_a_model_is_imported_and_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published = llama()
    published.save_pretrained("Llama-3.1-8B")
    names = run("huggingface.md", {"bcp": bcp, "torch": torch})
    for model in (names["model"], names["same"]):
        torch.testing.assert_close(logits(model), logits(published), rtol=0, atol=0)


def test_tensorboard_shows_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    run("monitor.md", {"bcp": bcp, "steps": 3, "state": {"model": {"w": torch.ones(1000)}}})
    shown = EventAccumulator("runs/7b-logs").Reload()
    assert {"checkpoint/seconds/stage", "checkpoint/seconds/write"} < set(shown.Tags()["scalars"])
    assert [(one.step, one.value > 4000) for one in shown.Scalars("checkpoint/bytes")] == [(n, True) for n in (1, 2, 3)]
