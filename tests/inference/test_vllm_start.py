"""vLLM itself, started from our checkpoints: the same tokens as from its own loader. Needs vLLM (see CONTRIBUTING)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

import bytecheckpoint as bcp  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# One engine a process: what an engine leaves behind, in memory or of processes, goes with it.
_START = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    engine = LLM(dtype="float32", enforce_eager=True, max_model_len=64, **arguments)
    asked = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [9, 8]}]
    given = engine.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in given]))
"""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 128}
    # Wide enough that tokens differ.
    if kind == "llama":
        config = transformers.LlamaConfig(initializer_range=0.15, tie_word_embeddings=False, **sizes)
        return transformers.LlamaForCausalLM(config).eval()
    # Biases on query, key and value; the head is the embedding.
    config = transformers.Qwen2Config(initializer_range=0.15, tie_word_embeddings=True, **sizes)
    return transformers.Qwen2ForCausalLM(config).eval()


def _tokens(**arguments: Any) -> list[list[int]]:
    script = [sys.executable, "-c", _START, json.dumps({"skip_tokenizer_init": True, **arguments})]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=400, env={**os.environ, **_ENVIRONMENT}, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    found: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return found


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A Hugging Face folder, our checkpoint of the same model, and the tokens that vLLM's own loader gives."""
    folder = tmp_path_factory.mktemp(request.param)
    model = _model(request.param)
    model.save_pretrained(folder / "hf")
    bcp.save(folder / "checkpoint", {"model": model}, layout="whole")
    return folder / "hf", folder / "checkpoint", _tokens(model=str(folder / "hf"), load_format="safetensors")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_same_tokens_as_from_its_own_loader(stored: tuple[Path, Path, Any], tp: int) -> None:
    folder, checkpoint, expected = stored
    options: dict[str, Any] = {"tensor_parallel_size": tp}
    if tp > 1:
        options["distributed_executor_backend"] = "mp"
    found = _tokens(
        model=str(folder), load_format="bcp", model_loader_extra_config={"path": str(checkpoint)}, **options
    )
    assert found == expected


def test_a_model_stored_whole_needs_no_other_folder(stored: tuple[Path, Path, Any]) -> None:
    _, checkpoint, expected = stored
    directory = bcp.open(checkpoint).model_directory
    assert _tokens(model=directory, load_format="bcp") == expected
