"""Write and read checkpoint folders with Megatron-core's own ``dist_checkpointing``, in the form of its trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mcore_training import Training


@dataclass(frozen=True)
class Form:
    """How Megatron names and divides what it saves."""

    per_layer: bool = True
    optimizer: str = "fully_reshardable"
    prefix: bool = False

    def metadata(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "distrib_optim_sharding_type": self.optimizer,
            "distrib_optim_fully_reshardable_mem_efficient": True,
            "chained_optim_avoid_prefix": not self.prefix,
        }
        if self.per_layer:
            result.update(singleton_local_shards=True)
        return result


def scheduler(job: Training) -> Any:
    """A scheduler of Megatron that has set the learning rate and the weight decay of the job's steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rates = {"init_lr": 0.0, "max_lr": job.recipe.lr, "min_lr": 0.0, "lr_warmup_steps": 1, "lr_decay_steps": 20}
    decays = {"start_wd": 0.2, "end_wd": 0.4, "wd_incr_steps": 20, "wd_incr_style": "linear"}
    made = OptimizerParamScheduler(job.optimizer, lr_decay_style="cosine", **rates, **decays)
    made.step(job.steps)
    return made


def sharded_state(job: Training, form: Form, *, is_loading: bool = False) -> dict[str, Any]:
    """The state dict of Megatron's trainer."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = form.metadata()
    models = {name: module.sharded_state_dict(metadata=metadata) for name, module in _modules(job).items()}
    state: dict[str, Any] = dict(models)
    state["optimizer"] = job.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    if is_loading:
        return state
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    state.update(
        args=Namespace(num_layers=4, untie_embeddings_and_output_weights=not job.recipe.tied),
        checkpoint_version=3.0,
        iteration=job.steps,
        num_floating_point_operations_so_far=1e9,
        opt_param_scheduler=scheduler(job).state_dict(),
        rng_state=ShardedObject(
            "rng_state",
            [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"model-parallel-rng": torch.arange(9)}}],
            (job.layout.pp, job.layout.tp),
            (pp, tp),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
    )
    return state


def write_folder(job: Training, path: str, form: Form) -> None:
    """Save as Megatron's trainer does."""
    scheduler(job)
    write_state(path, sharded_state(job, form), content_metadata=form.metadata())


def write_state(path: str, state: dict[str, Any], **options: Any) -> None:
    """Save any state dict."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True)
    dist.barrier()
    with saves_in_a_pool():
        dist_checkpointing.save(state, path, **options)


@contextlib.contextmanager
def saves_in_a_pool(*, with_server: bool = False) -> Iterator[None]:
    """Let the ranks of a pool save with Megatron.

    It starts processes, which Python refuses in the ranks of a pool, because they are daemons. One of these is a server
    for the results of the others, which imports torch and the script for 3 s; without it, a queue in this process does
    the same.
    """
    get_context = torch.multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        if method == "spawn":
            return SimpleNamespace(Manager=lambda: SimpleNamespace(Queue=queue.Queue))
        return get_context(method)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(multiprocessing.current_process()._config, daemon=False))
        if not with_server:
            stack.enter_context(mock.patch.object(torch.multiprocessing, "get_context", context))
        yield


def read_folder(job: Training, path: str, form: Form) -> None:
    """Load as Megatron's trainer does."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded_state(job, form, is_loading=True), path)
    for name, module in _modules(job).items():
        module.load_state_dict(loaded[name])
    with torch.no_grad():  # without it, Megatron refuses to fill float32 parameters from buckets
        job.optimizer.load_state_dict(loaded["optimizer"])
    job.steps = loaded["iteration"]


def _modules(job: Training) -> dict[str, Any]:
    """The model chunks by their names in the trainer's state dict."""
    chunks = [chunk.module.module if job.recipe.is_mixed else chunk.module for chunk in job.chunks]
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}
