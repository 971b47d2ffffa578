"""What scripts with vLLM import, and a change: vLLM forks its own processes, as it does where it runs on GPUs.

On CPUs it spawns them, and each would import vLLM again, for ten seconds.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import transformers  # noqa: F401
import vllm.v1.engine.async_llm  # noqa: F401

import bytecheckpoint.inference.push  # noqa: F401

_find_context: Any = multiprocessing.get_context


def _forking(method: str | None = None) -> Any:
    return _find_context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
