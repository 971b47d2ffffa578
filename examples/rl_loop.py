"""A small reinforcement-learning loop: an FSDP-2 trainer on two processes, vLLM with two workers, a push each step.

    python examples/rl_loop.py --steps 4

Needs vLLM and transformers; ``make test-vllm`` installs both, for CPUs, into ``.venv-vllm``. In each step the engine
samples with the weights of the last push, and the trainer rewards even tokens, makes a step and pushes. The engine's
greedy tokens must equal those of the trainer's weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.fsdp import fully_shard

from bytecheckpoint.inference.push import HttpEngine, Pusher

TRAINERS, WORKERS, LENGTH = 2, 2, 12
PROMPTS = [[1, 2, 3], [9, 8], [100, 50, 25], [7]]

CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def configuration() -> Any:
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return transformers.LlamaConfig(initializer_range=0.15, tie_word_embeddings=False, **sizes)


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Start vLLM's server, and return its address. The first push replaces the weights with which it starts."""
    configuration().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "policy", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--tensor-parallel-size", str(WORKERS)]
    command += ["--distributed-executor-backend", "mp"]
    command += ["--worker-extension-cls", "bytecheckpoint.inference.vllm.worker.WorkerExtension"]
    environment = {**os.environ, **CPU_SETTINGS, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "engine.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_up(url):
            if server.poll() is not None:
                raise SystemExit(f"the engine did not start:\n{(folder / 'engine.log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _is_up(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def ask(url: str, prompt: list[int], temperature: float) -> list[int]:
    document = {"model": "policy", "prompt": prompt, "max_tokens": LENGTH, "temperature": temperature}
    document |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    data = json.dumps(document).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
    return tokens


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Generate with the trainer's weights, on all ranks."""
    tokens = list(prompt)
    for _ in range(LENGTH):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def train_step(model: Any, optimizer: torch.optim.Optimizer, samples: list[tuple[list[int], list[int]]]) -> float:
    """Make one REINFORCE step, and return the mean reward: the share of even tokens."""
    rewards = torch.tensor([sum(token % 2 == 0 for token in given) / len(given) for _, given in samples])
    for (prompt, given), advantage in zip(samples, (rewards - rewards.mean()).tolist(), strict=True):
        tokens = torch.tensor([prompt + given])
        logits = model(tokens[:, :-1], use_cache=False).logits[:, len(prompt) - 1 :]
        likely = logits.log_softmax(-1).gather(-1, tokens[:, len(prompt) :, None])
        (-advantage * likely.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(rewards.mean())


def trainer(rank: int, port: int, url: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(configuration())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with Pusher([HttpEngine(url)] if rank == 0 else None, deadline_s=120) as pusher:
        pusher.push(model, version=0)
        for step in range(1, steps + 1):
            samples = [[(prompt, ask(url, prompt, 1.0)) for prompt in PROMPTS * 2]] if rank == 0 else [None]
            dist.broadcast_object_list(samples)
            reward = train_step(model, optimizer, samples[0])  # type: ignore[arg-type]
            report = pusher.push(model, version=step)
            expected = [greedy(model, prompt) for prompt in PROMPTS]
            if rank == 0:
                found = [ask(url, prompt, 0.0) for prompt in PROMPTS]
                share = sum(worker.sent for worker in report.workers) / (WORKERS * report.engine_bytes)
                print(
                    f"step {step}: reward {reward:.3f}, pushed in {report.total_s * 1000:.0f} ms, {share:.0%} of "
                    f"what a broadcast sends, tokens {'equal' if found == expected else 'DIFFER'}",
                    flush=True,
                )
                if found != expected:
                    raise SystemExit(f"the engine generates {found}, but the trainer's weights generate {expected}")
            dist.barrier()
        if rank == 0:
            print(report, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder)) as url:
        mp.spawn(trainer, args=(random.randint(20000, 29000), url, steps), nprocs=TRAINERS)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
