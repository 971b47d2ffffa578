"""One GPT in every framework and sharding, whose states can be compared in one form: the jobs of the matrix of pairs.

Like ``engines``, nothing here uses the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_jobs import deepspeed_job, model_form
from engines import TORCH_KINDS, Form, Job, adamw, lenient_warnings, sharded_form, torch_job
from gpt_twin import EXPERTS, VOCABULARY, Gpt, loss
from mcore_training import Layout, Recipe, Training, global_batch, stored_name, training
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

# The number of ranks of each kind.
KINDS = {
    "ddp": 2,
    "fsdp1": 4,
    "fsdp2": 2,
    "hsdp": 4,
    "tp-fsdp2": 4,
    "pp": 2,
    "ep": 4,
    "megatron-tp2-pp2": 4,
    "megatron-ep2": 2,
    "megatron-dp2": 2,
    "zero1": 4,
    "zero2": 2,
    "zero3": 4,
}

_MEGATRON = {
    "megatron-tp2-pp2": Layout(tp=2, pp=2),
    "megatron-ep2": Layout(ep=2, world=2),
    "megatron-dp2": Layout(world=2),
}


@contextmanager
def gpt_job(kind: str, seed: int) -> Iterator[Any]:
    """A job of this kind on all ranks of the process group. Seeds also differ in the learning rate."""
    lr = 1e-3 * seed
    if kind in _MEGATRON:
        # All experts compute: rounding to bfloat16 must not change which do.
        recipe = Recipe(experts=EXPERTS, top=EXPERTS, padded_vocabulary=VOCABULARY, lr=lr, clip=0.0)
        with training(_MEGATRON[kind], recipe, seed) as job:
            yield MegatronJob(job)
    else:
        with lenient_warnings():
            yield _JOBS[kind](seed, lr)


@dataclass
class MegatronJob:
    """What ``Job`` offers, of a job of Megatron-core."""

    job: Training

    @property
    def state(self) -> dict[str, Any]:
        return self.job.state

    def train(self, steps: range) -> list[float]:
        self.job.steps = steps.start
        return self.job.train(len(steps))

    def full_form(self) -> Form:
        found: Form = {}
        for key, value in self.job.full_state().items():
            found[stored_name(key).replace("/", ".").removesuffix(".master")] = value
        return _checked(found)


def _checked(form: Form) -> Form:
    """Compare the parameters that compute with the master weights, and leave them out."""
    for key in [key for key in form if key.endswith(".model")]:
        assert torch.equal(form.pop(key), form[key.removesuffix(".model")].bfloat16().float()), key
    return form


def _complete(job: Job, ranks: DeviceMesh | None = None) -> Job:
    """Divide the batches among the ranks (of a mesh), and let every rank return the form of the whole job."""
    of_rank = job.form
    parts = dist.get_world_size() if ranks is None else ranks.size()
    part = dist.get_rank() if ranks is None else ranks.get_local_rank()

    def form() -> Form:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, {name: value.detach().float() for name, value in of_rank().items()})
        whole: Form = {}
        for found in everywhere:
            for name, value in found.items():
                assert torch.equal(whole.setdefault(name, value), value), f"{name} differs between ranks"
        for name in [name for name in whole if f"{name}.step" in whole]:
            group = job.optimizer.param_groups["norm" in name]
            whole.update({f"{name}.{key}": torch.tensor(group[key]) for key in ("lr", "weight_decay")})
        return _checked(whole)

    job.form, job.data = form, lambda step: global_batch(step).chunk(parts)[part]
    return job


def _plain(kind: str, seed: int, lr: float) -> Job:
    return _complete(torch_job(kind, seed, lr, make=Gpt))


def _engine(kind: str, seed: int, lr: float) -> Job:
    job = deepspeed_job(kind, seed, lr, module=Gpt)
    masters = job.form
    job.form = lambda: masters() | {f"{name}.model": param for name, param in model_form(job.model).items()}
    return _complete(job)


def _sharded(model: Any, lr: float) -> Job:
    optimizer = adamw(model, lr)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Job(model, optimizer, lambda loss: loss.backward(), update, lambda: sharded_form(model, optimizer))


def _shard(model: Gpt, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> Any:
    for block in model.blocks:
        if experts is not None:
            fully_shard(block.mlp.experts, mesh=experts)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _hsdp(seed: int, lr: float) -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _complete(_sharded(_shard(Gpt(seed), mesh), lr))


def _tp_fsdp2(seed: int, lr: float) -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Gpt(seed)
    model.split_tensors(mesh["tp"])
    return _complete(_sharded(_shard(model, mesh["dp"]), lr), mesh["dp"])


def _ep(seed: int, lr: float) -> Job:
    """The experts of a rank are sharded over one dimension, the rest over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Gpt(seed)
    model.split_experts(mesh["ep"])
    return _complete(_sharded(_shard(model, mesh._flatten("all"), mesh["dp"]), lr), mesh["dp"])


class PipelineJob(Job):
    """The second stage of a model has the loss. ``model`` is a list of this rank's stages."""

    def train(self, steps: range) -> list[float]:
        (stage,) = self.model
        rank, losses = dist.get_rank(), []
        schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=loss)
        for step in steps:
            tokens = global_batch(step)
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(tokens[:, :-1])
            else:
                schedule.step(target=tokens[:, 1:], losses=found)
            dist.all_reduce(stage.embedding["word_embeddings"].weight.grad)
            self.update()
            mean = torch.stack(found).mean().detach() if found else torch.zeros(())
            dist.all_reduce(mean)
            losses.append(mean.item())
        return losses


def _pp(seed: int, lr: float) -> Job:
    stage = Gpt(seed).stage(dist.get_rank())
    job = _sharded(stage, lr)
    return _complete(PipelineJob([stage], job.optimizer, job.backward, job.update, job.form))


_JOBS: dict[str, Callable[[int, float], Job]] = {
    "hsdp": _hsdp,
    "tp-fsdp2": _tp_fsdp2,
    "pp": _pp,
    "ep": _ep,
    **{kind: partial(_plain, kind) for kind in TORCH_KINDS},
    **{kind: partial(_engine, kind) for kind in ("zero1", "zero2", "zero3")},
}
