"""Runs pushes into one vLLM engine in a separate process, as a JSON document on its command line describes.

    {"engine": {...arguments of LLM}, "model": "llama", "steps": [...]}

A step is ``["push", seed]``, ``["push nan", seed, name]`` (without a check), ``["push without", seed, name]``, ``["push
longer", seed, name]`` (by a row), ``["stream", seed, bytes]`` (of memory that a worker may take),
``["stream by group", seed, bytes]``, ``["push draft",
seed]``, ``["push adapter", seed, layers]`` (None: of all layers; with one tensor, if it is named, longer by a row, or
more), ``["adapter", path]`` (put into a slot), ``["fail next load", worker]``, ``["reload"]``, ``["sleep"]``,
``["wake up", tags]``, ``["digest"]``, ``["replayed"]``, ``["generate"]`` or
``["drafted"]`` (how many tokens were proposed and accepted since the last time). What came of each is printed as JSON,
after ``RESULTS``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from warm_python import WarmPython, warm_python

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.inference.push import AdapterEngine, DraftEngine, LocalEngine, Pusher
from bytecheckpoint.testing import time_limit

PROMPTS = ([1, 2, 3], [9, 8])
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
}


def vllm_python() -> WarmPython:
    return warm_python("vllm_forks", **ENVIRONMENT)


def results_of(script: str, argument: str) -> list[Any]:
    """Run a script with vLLM, and return what it prints after ``RESULTS``."""
    done = vllm_python().run([script, argument], timeout=time_limit(280), env={**os.environ, **ENVIRONMENT})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    found: list[Any] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


def made(kind: str, seed: int) -> Any:
    """A tiny model. Its weights are so wide that tokens differ from seed to seed."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 128}
    if kind == "llama":
        config = transformers.LlamaConfig(initializer_range=0.15, tie_word_embeddings=False, **sizes)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "mixtral":
        sizes["intermediate_size"] = 192
        config = transformers.MixtralConfig(
            initializer_range=0.15, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, **sizes
        )
        return transformers.MixtralForCausalLM(config).eval()
    if kind == "qwen3_moe":
        # A layer of each kind; matrices are of whole blocks of 128, and of more than one.
        sizes |= {
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 64,
            "moe_intermediate_size": 256,
            "num_key_value_heads": 4,
        }
        config = transformers.Qwen3MoeConfig(
            initializer_range=0.15, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], **sizes
        )
        return transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()
    # Biases on query, key and value; the head is the embedding.
    config = transformers.Qwen2Config(initializer_range=0.15, tie_word_embeddings=True, **sizes)
    return transformers.Qwen2ForCausalLM(config).eval()


def run_pushes(kind: str, steps: list[Any], **engine: Any) -> list[Any]:
    """What came of each step in an engine of these arguments."""
    if engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1) > 1:
        engine["distributed_executor_backend"] = "mp"
    job = {"engine": engine, "model": kind, "steps": steps}
    return results_of(__file__, json.dumps(job))


def reference_tokens(model: Any, *more: list[int]) -> list[list[int]]:
    """Greedy tokens without an engine, from ``PROMPTS`` and ``more``."""
    found = []
    for prompt in [*PROMPTS, *more]:
        given = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found.append(given[0][len(prompt) :].tolist())
    return found


def _generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    given = llm.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [list(one.outputs[0].token_ids) for one in given]


def _drafted(llm: Any) -> list[int]:
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [int(counters[f"vllm:spec_decode_num_{kind}_tokens"]) for kind in ("draft", "accepted")]


def _main(job: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True}
    llm = LLM(**engine | job["engine"])
    if "FaultyWorkers" in job["engine"].get("worker_extension_cls", ""):
        llm.collective_rpc("bcp_test_make_room")
    local = LocalEngine(llm)
    results: list[Any] = []
    counted, slotted = [0, 0], 0
    with Pusher(local, deadline_s=time_limit(120)) as pusher:
        for what, *arguments in job["steps"]:
            if what == "generate":
                results.append(_generate(llm))
            elif what == "fail next load":
                results.append(llm.collective_rpc("bcp_test_fail", args=(arguments[0],)))
            elif what == "digest":
                results.append(llm.collective_rpc("bcp_test_digest"))
            elif what == "replayed":
                results.append(llm.collective_rpc("bcp_test_replayed"))
            elif what == "reload":
                results.append(llm.collective_rpc("reload_weights"))
                llm.reset_prefix_cache()
            elif what in ("sleep", "wake up"):
                level = arguments[0] if arguments else 2
                results.append(llm.sleep(level=level) if what == "sleep" else llm.wake_up(arguments[0]))
            elif what == "served":
                results.append(_served(pusher))
            elif what == "vllm's version":
                results.append(llm.get_weight_version())
            elif what in ("stream", "stream by group"):
                seed, memory = arguments
                group: Any = "gloo" if what == "stream by group" else None
                options = {"deadline_s": 120, "memory_bytes": memory, "chunk_bytes": 16 << 10, "group": group}
                with Pusher(local, **options) as streaming:
                    results.append(_push(streaming, job["model"], seed))
                    results[-1]["set aside"] = [one["set_aside"] for one in streaming.state()[0]]
            elif what == "push draft":
                with Pusher(DraftEngine(local), deadline_s=time_limit(120)) as drafts:
                    results.append(_push(drafts, job["model"], *arguments))
            elif what == "push adapter":
                results.append(_push_adapter(local, job["model"], *arguments))
            elif what == "adapter":
                slotted += 1
                results.append(llm.llm_engine.add_lora(LoRARequest("tuned", slotted, arguments[0])))
            elif what == "drafted":
                before, counted = counted, _drafted(llm)
                results.append([after - were for after, were in zip(counted, before, strict=True)])
            else:
                results.append(_push(pusher, job["model"], *arguments, change=what))
    print("RESULTS", json.dumps(results), flush=True)


def _push(pusher: Pusher, kind: str, seed: int, name: str = "", change: str = "push") -> Any:
    state = _changed(made(kind, seed), name, change) if name else made(kind, seed).state_dict()
    try:
        report = pusher.push({"model": state}, version=seed, check_finite=change != "push nan")
    except BytecheckpointError as error:
        return {"error": type(error).__name__, "message": str(error), "served": _served(pusher)}
    workers = [[worker.requested, worker.sent] for worker in report.workers]
    return {"workers": workers, "bytes": report.engine_bytes, "served": _served(pusher), "mode": report.mode}


def _push_adapter(local: LocalEngine, kind: str, seed: int, layers: list[int] | None, name: str = "") -> Any:
    from vllm_loras import lora_of

    tensors, config = lora_of(kind, seed, layers)
    if name:
        tensor = tensors.get(name, torch.zeros(8, 128))
        tensors[name] = torch.cat([tensor, tensor[:1]])
    with Pusher(AdapterEngine(local, "tuned", config), deadline_s=time_limit(120)) as pusher:
        try:
            return [worker.sent for worker in pusher.push({"model": tensors}).workers]
        except BytecheckpointError as error:
            return {"error": type(error).__name__, "message": str(error)}


def _changed(model: Any, name: str, change: str) -> dict[str, torch.Tensor]:
    """With ``name`` left out, or longer. It may be one that the hub has, and transformers has not."""
    state = model.state_dict()
    if change == "push nan":
        state[name].view(-1)[7] = torch.nan
        return dict(state)
    if name not in state:
        state = revert_weight_conversion(model, state)
    tensor = state.pop(name)
    if change == "push longer":
        state[name] = torch.cat([tensor, tensor[:1]])
    return state


def _served(pusher: Pusher) -> list[Any]:
    return [
        [one["version"], one["inconsistent_reason"], one["intact"], one["digest"].hex()] for one in pusher.state()[0]
    ]


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
