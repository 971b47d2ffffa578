"""Receive weight pushes in vLLM's workers.

Start vLLM with ``--worker-extension-cls bytecheckpoint.inference.vllm.worker.WorkerExtension``. This module imports
nothing of vLLM: each part that does is imported when a sender first needs it, if this vLLM has what it uses.
"""

from __future__ import annotations

from typing import Any

from ...errors import StateError, UsageError
from ..push.engines.base import split_target
from ..push.engines.rpc import REPLICATED, post_answer
from ..push.receiver import Receiver, refuse
from .private import imports_of


def answer(vllm_config: Any, model: Any, text: str, runner: Any = None) -> str:
    """The response of the worker's model, draft model or adapter to a sender. Never raises."""
    request = text
    try:
        target, request = split_target(text)
        found = receiver(vllm_config, model, runner, target)
        _check_balancing(vllm_config.parallel_config)
        return found.answer(request, None if target is None else receiver(vllm_config, model, runner))
    except Exception as error:  # noqa: BLE001 - vLLM would confuse the other workers' responses with later ones
        return refuse(error, request)


def receiver(vllm_config: Any, model: Any, runner: Any = None, target: Any = None) -> Receiver:
    """The receiver of a target of a worker, by default its model. Raises ``StateError`` when vLLM lacks what a part
    needs, or the engine was started without it."""
    with imports_of("push"):
        from .model import receiver_of, receiver_of_draft
    if target is None:
        return receiver_of(vllm_config, model, runner)
    if "draft" in target:
        with imports_of("drafts"):
            return receiver_of_draft(vllm_config, runner)
    with imports_of("adapters"):
        from .adapters import receivers_of
    return receivers_of(model).receiver(target)


def _replicas(parallel: Any) -> int:
    """The number of data-parallel replicas that one address reaches."""
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        return 1
    # vLLM configures each replica of a dense model as if it were the only one, except for the last of these numbers.
    size = parallel.data_parallel_size
    return int(size if size > 1 or parallel.enable_elastic_ep else parallel.elastic_ep_max_dp_size)


def _check_balancing(parallel: Any) -> None:
    if parallel.data_parallel_hybrid_lb:
        raise StateError(
            "this engine was started with --data-parallel-hybrid-lb, where a worker does not know how many replicas "
            "one address reaches; start it with --data-parallel-external-lb, or with one address for all replicas"
        )


class WorkerExtension:
    """A base class that vLLM adds to its worker class; its names must not clash with vLLM's."""

    def bcp_push(self, *arguments: Any, **options: Any) -> str:
        """Answer a sender's request: a text, and the address for the answer where the RPC would lose it. Never raises,
        also for wrong arguments."""
        worker: Any = self
        try:
            request, *where = arguments
            if options or not isinstance(request, str) or len(where) > 1:
                raise UsageError("a request to bcp_push is one text, and an address for the answer")
            parallel = worker.vllm_config.parallel_config
            replicas = _replicas(parallel)
            if not where and replicas > 1:
                return REPLICATED
            response = answer(worker.vllm_config, worker.model_runner.get_model(), request, worker.model_runner)
            if not where:
                return response
            number = parallel.rank + (parallel.data_parallel_index * parallel.world_size if replicas > 1 else 0)
            workers = replicas * parallel.world_size
            post_answer(where[0], number, workers, response)
            return ""
        except Exception as error:  # noqa: BLE001 - as in `answer`
            return refuse(error, None)
