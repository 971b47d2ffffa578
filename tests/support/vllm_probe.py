"""One engine a process: what an engine leaves behind, in memory or of processes, goes with it.

    python vllm_probe.py '{"model": ..., other arguments of vllm.LLM}'

prints ``TOKENS <json>``, of greedy generation from two prompts, and ``DIGESTS <json>``, for each rank of its parameters
as they were when they had been loaded, before the engine packed them in its own way.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import xxhash
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import base_loader

PROMPTS = [[1, 2, 3], [9, 8]]


_digests: list[str] = []
_pack = base_loader.process_weights_after_loading


def _look_and_pack(model: Any, *arguments: Any, **options: Any) -> None:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    _digests.append(digest.hexdigest())
    _pack(model, *arguments, **options)


# Workers import this before they load.
base_loader.process_weights_after_loading = _look_and_pack


class Probe:
    """A worker extension."""

    def probe(self) -> tuple[str, str]:
        return _digests[-1], os.environ.get("VLLM_DIST_IDENT", "")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    engine = LLM(
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        worker_extension_cls="vllm_probe.Probe",
        **arguments,
    )
    digests, names = zip(*engine.collective_rpc("probe"), strict=True)
    print("DIGESTS", json.dumps(digests))
    # Of the shared memory that vLLM leaves behind.
    print("LEAVES", json.dumps(names[0]))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    given = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy)
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in given]))


if __name__ == "__main__":
    main()
