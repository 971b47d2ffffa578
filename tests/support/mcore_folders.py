"""Write checkpoint folders with Megatron-core's own ``dist_checkpointing``, in the form that its trainer uses."""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mcore_training import Training

SCHEDULER = {"max_lr": 1e-2, "lr_warmup_steps": 0, "num_steps": 16, "lr_decay_style": "cosine"}


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


def sharded_state(job: Training, form: Form, *, is_loading: bool = False) -> dict[str, Any]:
    """The state dict of Megatron's trainer."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = form.metadata()
    state: dict[str, Any] = {
        "args": Namespace(num_layers=4, untie_embeddings_and_output_weights=not job.recipe.tied),
        "checkpoint_version": 3.0,
        "iteration": job.steps,
        "num_floating_point_operations_so_far": 1e9,
        "opt_param_scheduler": dict(SCHEDULER),
    }
    models = {}
    for number, chunk in enumerate(job.chunks):
        name = "model" if len(job.chunks) == 1 else f"model{number}"
        module = chunk.module.module if job.recipe.bf16 else chunk.module
        models[name] = module.sharded_state_dict(metadata=metadata)
    state.update(models)
    state["optimizer"] = job.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    state["rng_state"] = ShardedObject(
        "rng_state",
        [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"model-parallel-rng": torch.arange(9)}}],
        (job.layout.pp, job.layout.tp),
        (pp, tp),
        replica_id=parallel_state.get_data_parallel_rank(),
    )
    return state


def write_folder(job: Training, path: str, form: Form) -> None:
    """Save as Megatron's trainer does."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True)
    dist.barrier()
    # It starts processes, which Python refuses in the ranks of the pool, because they are daemons.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        dist_checkpointing.save(sharded_state(job, form), path, content_metadata=form.metadata())
