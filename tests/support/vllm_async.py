"""Pushes into an ``AsyncLLM`` of two data-parallel replicas, in the process of its event loop.

    python vllm_async.py FOLDER

prints what came of each step as JSON, after ``RESULTS``: of each push its error, the tokens of each replica, vLLM's
version, and whether it is paused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_pushes import PROMPTS, made

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.inference.push import LocalEngine, Pusher
from bytecheckpoint.testing import time_limit

_REPLICAS = 2


async def _generate(llm: AsyncLLM, prompt: Any, replica: int, count: int = 8) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    name = f"{replica} {list(prompt)} {count}"
    async for found in llm.generate(
        {"prompt_token_ids": list(prompt)}, greedy, request_id=name, data_parallel_rank=replica
    ):
        tokens = list(found.outputs[0].token_ids)
    return tokens


async def _served(llm: AsyncLLM) -> list[Any]:
    tokens = [[await _generate(llm, prompt, replica) for prompt in PROMPTS] for replica in range(_REPLICAS)]
    return [tokens, await llm.get_weight_version(), await llm.is_paused()]


async def _push(engine: Any, seed: int) -> str:
    def push() -> str:
        with Pusher(engine, deadline_s=time_limit(60)) as pusher:
            try:
                pusher.push(made("llama", seed), version=seed)
            except BytecheckpointError as error:
                return f"{type(error).__name__}: {error}"
        return ""

    return await asyncio.to_thread(push)


async def _main(folder: str) -> list[Any]:
    arguments = AsyncEngineArgs(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        data_parallel_size=_REPLICAS, worker_extension_cls="vllm_fault.FaultyWorkers",
    )  # fmt: skip
    llm = AsyncLLM.from_engine_args(arguments)
    results: list[Any] = []
    try:
        # Requests run meanwhile, and end with the old or the new weights.
        running = asyncio.gather(*(_generate(llm, PROMPTS[0], replica, 50) for replica in range(_REPLICAS)))
        results.append([await _push(LocalEngine(llm, pause="wait"), 1), len((await running)[0]), *await _served(llm)])
        results.append([await _push(LocalEngine(llm, pause="keep"), 2), *await _served(llm)])
        await llm.collective_rpc("bcp_test_fail", args=(1,))
        results.append([await _push(LocalEngine(llm), 3), *await _served(llm)])
        results.append([await _push(LocalEngine(llm, pause="abort"), 4), *await _served(llm)])
        with Pusher(LocalEngine(llm), deadline_s=time_limit(60)) as pusher:
            try:
                pusher.push(made("llama", 5))
            except BytecheckpointError as error:
                results.append(f"{type(error).__name__}: {error}")
    finally:
        llm.shutdown()
    return results


if __name__ == "__main__":
    print("RESULTS", json.dumps(asyncio.run(_main(sys.argv[1]))), flush=True)
