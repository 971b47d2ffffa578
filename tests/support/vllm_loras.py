"""Pushes of LoRA adapters into one vLLM engine in a separate process, as a JSON document on its command line describes.

    {"engine": {...arguments of LLM}, "folder": where adapters are on disk, "steps": [...]}

A step is ``["push", name, seed]``, ``["push base", seed]``, ``["fail next load"]``, ``["generate"]``, ``["generate",
name]`` (by a path where nothing is) or ``["generate from disk", name, seed]``. What came of each is printed as JSON,
after ``RESULTS``.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_pushes import PROMPTS, made

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.inference.push import AdapterEngine, LocalEngine, Pusher
from bytecheckpoint.testing import time_limit

# A part of what vLLM packs into one layer, and all of other layers.
CONFIG = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none",
    "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}  # fmt: skip
# So long that vLLM finds the beginning of it in its prefix cache.
LONG = [1 + number % 200 for number in range(40)]


def lora(seed: int) -> dict[str, torch.Tensor]:
    """An adapter for ``made("llama", ...)``, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in made("llama", 0).named_parameters():
        if name.split(".")[-2] in CONFIG["target_modules"]:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = parameter.shape
            found[f"{module}.lora_A.weight"] = 0.2 * torch.randn(4, inputs, generator=generator)
            found[f"{module}.lora_B.weight"] = 0.2 * torch.randn(outputs, 4, generator=generator)
    return found


def expert_lora(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter for the experts of ``made("mixtral", ...)``, by the names that vLLM has for each, and its
    configuration."""
    generator = torch.Generator().manual_seed(seed)
    sizes = made("mixtral", 0).config
    found = {}
    for layer, expert in itertools.product(range(sizes.num_hidden_layers), range(sizes.num_local_experts)):
        for kind in ("w1", "w2", "w3"):
            module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{kind}"
            inputs, outputs = (sizes.hidden_size, sizes.intermediate_size)[:: -1 if kind == "w2" else 1]
            found[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            found[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    return found, {**CONFIG, "target_modules": ["w1", "w2", "w3"]}


def merge_descriptions(model_seed: int, lora_seed: int) -> Any:
    """The model that the adapter makes of a model."""
    model, factors = made("llama", model_seed), lora(lora_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in factors:
                parameter += 2 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
    return model


def lora_of(kind: str, seed: int, layers: list[int] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """For such a model, of these layers alone, with its configuration."""
    if kind == "mixtral":
        return expert_lora(seed)
    if layers is None:
        return lora(seed), CONFIG
    tensors = {name: tensor for name, tensor in lora(seed).items() if int(name.split(".")[4]) in layers}
    return tensors, {**CONFIG, "layers_to_transform": layers}


def store(folder: Path, seed: int, layers: list[int] | None = None, kind: str = "llama") -> str:
    """As PEFT stores it."""
    path = folder / f"lora-{seed}-{layers}"
    path.mkdir(parents=True, exist_ok=True)
    tensors, config = lora_of(kind, seed, layers)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


class _Runner:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, enable_lora=True,
            max_lora_rank=8, worker_extension_cls="vllm_fault.FaultyWorkers", **job["engine"],
        )  # fmt: skip
        self._folder = Path(job["folder"])
        self._numbers: dict[str, int] = {}
        self._pushers: dict[str, Pusher] = {}

    def do(self, what: str, *arguments: Any) -> Any:
        if what == "push":
            return self._push(*arguments)
        if what == "push base":
            with Pusher(LocalEngine(self._llm), deadline_s=time_limit(120)) as pusher:
                pusher.push({"model": made("llama", arguments[0]).state_dict()})
            return None
        if what == "fail next load":
            return self._llm.collective_rpc("bcp_test_fail_adapter")
        if what == "count known":
            return self._llm.collective_rpc("bcp_test_known_adapters")
        if what == "generate":
            return self._generate(*arguments, path="/nowhere")
        return self._generate(arguments[0], path=store(self._folder, arguments[1]))

    def _push(self, name: str, seed: int, without: str = "") -> Any:
        if name not in self._pushers:
            self._pushers[name] = Pusher(
                AdapterEngine(LocalEngine(self._llm), name, CONFIG), deadline_s=time_limit(120)
            )
        tensors = {key: tensor for key, tensor in lora(seed).items() if not without or without not in key}
        try:
            report = self._pushers[name].push({"model": tensors}, version=seed)
        except BytecheckpointError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"workers": [worker.requested for worker in report.workers], "bytes": report.engine_bytes}

    def _generate(self, name: str = "", path: str = "") -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        request = LoRARequest(name, number, path) if name else None
        asked = [{"prompt_token_ids": list(prompt)} for prompt in (*PROMPTS, LONG)]
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        given = self._llm.generate(asked, greedy, lora_request=request)
        return [list(one.outputs[0].token_ids) for one in given]


def _main(job: dict[str, Any]) -> None:
    runner = _Runner(job)
    print("RESULTS", json.dumps([runner.do(*step) for step in job["steps"]]), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
