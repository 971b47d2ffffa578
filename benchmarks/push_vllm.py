"""Time pushes into vLLM on this host, next to vLLM's own reload and one copy of the bytes in the same rounds.

    .venv-vllm/bin/python -m benchmarks.push_vllm [--rounds 5] [--json FILE] [--page docs/push.md]

Two engines, one after the other: a Llama of 0.77 GB, and a mixture of experts of 20,439 small tensors. In each round,
vLLM reloads its own files (from the page cache), two pushes fill the memory of both versions, all weights change, and a
push is timed, and another one of the same bytes. The engine is paused in the stage *apply*.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import header
from bytecheckpoint.inference.push import LocalEngine, Pusher, PushReport

__all__ = ["main", "measure", "table", "with_table"]

_MARK = "<!-- The rest is written by `python -m benchmarks.push_vllm --page`. -->"
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_ROWS = {
    "copy": "one copy of the bytes",
    "reload": "vLLM's own reload",
    "pause": "pause of a push that changes all",
    "push": "the whole push",
    "same pause": "pause of a push that changes nothing",
    "same": "the whole push",
}


def _large() -> Any:
    import transformers

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 25, "num_attention_heads": 16}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=128, tie_word_embeddings=False)
    )


def _small() -> Any:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 52}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 128}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=260, max_position_embeddings=128, num_experts_per_tok=2)
    return transformers.Qwen3MoeForCausalLM(config)


def measure(model: Any, rounds: int) -> dict[str, Any]:
    """Seconds of every round, and the bytes and number of the tensors."""
    from safetensors.torch import load_file
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        state = {name: one.clone() for file in files for name, one in load_file(file).items()}
        extension = "bytecheckpoint.inference.vllm.worker.WorkerExtension"
        llm = LLM(
            model=folder,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            worker_extension_cls=extension,
        )
        seconds: dict[str, list[float]] = {}
        with Pusher(LocalEngine(llm), deadline_s=300) as pusher:
            for number in range(rounds + 1):
                found = {"copy": _copy(state)}
                begin = time.perf_counter()
                llm.collective_rpc("reload_weights")
                found["reload"] = time.perf_counter() - begin
                for _ in range(3):
                    for tensor in state.values():
                        tensor.add_(0.01 if number % 2 else -0.01)
                    found["push"], report = _push(pusher, state)
                found["pause"] = report.seconds["apply"]
                found["same"], report = _push(pusher, state)
                found["same pause"] = report.seconds["apply"]
                for name, value in found.items() if number else ():  # in the first round everything is planned
                    seconds.setdefault(name, []).append(value)
    return {"bytes": sum(one.nbytes for one in state.values()), "tensors": len(state), "seconds": seconds}


def _push(pusher: Pusher, state: Mapping[str, torch.Tensor]) -> tuple[float, PushReport]:
    begin = time.perf_counter()
    report = pusher.push({"model": state})
    return time.perf_counter() - begin, report


def _copy(state: Mapping[str, torch.Tensor]) -> float:
    copies = [torch.ones_like(one) for one in state.values()]
    begin = time.perf_counter()
    for copied, one in zip(copies, state.values(), strict=True):
        copied.copy_(one)
    return time.perf_counter() - begin


def table(document: dict[str, Any]) -> str:
    """Return the medians of all models, and their ratios to vLLM's reload."""
    models = document["models"]
    titles = [f"{one['bytes'] / 1e9:.2f} GB in {one['tensors']:,} tensors" for one in models]
    lines = ["| seconds, and as a multiple of vLLM's reload | " + " | ".join(titles) + " |"]
    lines.append("| --- |" + " ---: |" * len(models))
    for key, name in _ROWS.items():
        cells = []
        for one in models:
            median, reload = (statistics.median(one["seconds"][of]) for of in (key, "reload"))
            cells.append(f"{median:.2f} ({median / reload:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    about = document["header"]
    machine, day = about["machine"], about["created"][:10]
    rounds = about["settings"]["rounds"]
    lines += ["", f"Medians of {rounds} rounds on {day}, on {machine['cores']} cores ({machine['processor']})."]
    return "\n".join(lines)


def with_table(page: str, found: str) -> str:
    """Return the page with a new table after its mark."""
    text, mark, _ = page.partition(_MARK)
    return f"{text}{mark}\n\n{found}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="rewrite the table of this page of the documentation")
    options = parser.parse_args()
    os.environ.update({key: value for key, value in _ENVIRONMENT.items() if key not in os.environ})
    torch.set_num_threads(1)  # on a busy host, threads that wait for each other cost more than they save
    torch.set_default_dtype(torch.bfloat16)
    models = [make() for make in (_large, _small)]
    torch.set_default_dtype(torch.float32)
    found = [measure(model, options.rounds) for model in models]
    settings = {"rounds": options.rounds}
    document = {"header": header("python -m benchmarks.push_vllm", settings, Path.cwd()), "models": found}
    print(table(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.page:
        options.page.write_text(with_table(options.page.read_text(), table(document)))


if __name__ == "__main__":
    main()
