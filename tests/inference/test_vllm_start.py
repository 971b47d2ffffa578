"""vLLM itself, started from our checkpoints: as from its own loader, with a fraction of the bytes. Of pipeline stages,
and of ranks with whole experts: see tests/push/test_vllm_parallel.py. Needs vLLM."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

from sampling import sample  # noqa: E402
from vllm_pushes import ENVIRONMENT, vllm_python  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_SUPPORT = Path(__file__).parents[1] / "support"
# Large enough that the gaps which reads span are nothing.
_SIZES = {"vocab_size": 2000, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
# Wide enough that tokens differ.
_SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.15}
_WHOLE_ON_ALL_RANKS = ("norm", "mlp.gate.weight")  # norms and routers


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(tie_word_embeddings=False, intermediate_size=1024, **_SIZES)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "qwen2":
        # Biases on query, key and value; the head is the embedding.
        config = transformers.Qwen2Config(tie_word_embeddings=True, intermediate_size=1024, **_SIZES)
        return transformers.Qwen2ForCausalLM(config).eval()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    config = transformers.Qwen3MoeConfig(tie_word_embeddings=False, intermediate_size=1024, **experts, **_SIZES)
    return transformers.Qwen3MoeForCausalLM(config).eval()


@dataclass(frozen=True)
class Started:
    """What one engine gave: its tokens, each rank's digest, and the bytes that each rank says it has read."""

    tokens: list[list[int]]
    digests: list[str]
    read: list[int]


def _start(**arguments: Any) -> Started:
    if "tensor_parallel_size" in arguments:
        arguments["distributed_executor_backend"] = "mp"
    script = [str(_SUPPORT / "vllm_probe.py"), json.dumps(arguments)]
    done = vllm_python().run(script, timeout=time_limit(280), env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = {
        line.split()[0]: line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(_RESULT_LINES)
    }
    for left in Path("/dev/shm").glob(f"{json.loads(results['LEAVES']) or 'none'}*"):
        left.unlink()
    read = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes read", done.stdout + done.stderr)]
    return Started(json.loads(results["TOKENS"]), json.loads(results["DIGESTS"]), read)


_KINDS = sample(["llama", "qwen2", "qwen3_moe"], 1)
_RESULT_LINES = ("TOKENS ", "DIGESTS ", "LEAVES ")


@dataclass(frozen=True)
class Stored:
    """One model as a Hugging Face folder and as our checkpoint, and what vLLM's own loader makes of it."""

    model: Any
    folder: Path
    checkpoint: Path
    expected: Started

    @property
    def loader(self) -> dict[str, Any]:
        extra = {"path": str(self.checkpoint), "share_reads": "always"}
        return {"model": str(self.folder), "load_format": "bcp", "model_loader_extra_config": extra}


@pytest.fixture(scope="module", params=_KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    path = tmp_path_factory.mktemp(request.param)
    model = _model(request.param)
    model.save_pretrained(path / "hf")
    bcp.save(path / "checkpoint", {"model": model}, options=bcp.SaveOptions(layout="whole", chunk_size=4096))
    return Stored(model, path / "hf", path / "checkpoint", _start(model=str(path / "hf"), load_format="safetensors"))


def test_the_same_as_from_its_own_loader(stored: Stored) -> None:
    """It starts an engine, which takes long."""
    found = _start(**stored.loader)
    assert found.tokens == stored.expected.tokens
    assert found.digests == stored.expected.digests


@pytest.mark.sampled(1, of="starts of vLLM")
def test_each_of_two_ranks_reads_its_half(stored: Stored) -> None:
    """It starts an engine, which takes long."""
    found = _start(**stored.loader, tensor_parallel_size=2)
    assert found.tokens == stored.expected.tokens
    sizes = {name: tensor.nbytes for name, tensor in stored.model.named_parameters()}
    everywhere = sum(size for name, size in sizes.items() if any(part in name for part in _WHOLE_ON_ALL_RANKS))
    halves = (sum(sizes.values()) - everywhere) / 2
    heads = sum(file.stat().st_size for file in stored.checkpoint.glob("attempt-*/*.index.json")) + (16 << 10)
    assert len(found.read) == 2
    # Reads begin and end with pages.
    assert max(found.read) <= 1.01 * (halves + everywhere) + heads, (found.read, halves, everywhere, heads)


@pytest.mark.sampled(1, of="starts of vLLM")
def test_from_a_folder_of_another_library(stored: Stored) -> None:
    """It starts an engine, which takes long."""
    if stored.model.config.model_type != _KINDS[0]:
        pytest.skip("once is enough")
    found = _start(model=str(stored.folder), load_format="bcp")
    assert found.tokens == stored.expected.tokens


@pytest.mark.sampled(1, of="starts of vLLM")
def test_a_model_stored_whole_needs_no_other_folder(stored: Stored) -> None:
    """It starts an engine, which takes long."""
    if stored.model.config.model_type != _KINDS[0]:
        pytest.skip("once is enough")
    directory = bcp.open(stored.checkpoint).model_directory
    assert _start(model=directory, load_format="bcp").tokens == stored.expected.tokens
