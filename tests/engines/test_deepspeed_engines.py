"""What belongs to a DeepSpeed engine except for the tensors, and what is refused: on real engines, on CPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_engines import expert_engine, expert_steps, muon_engine, train
from deepspeed_jobs import deepspeed_job, initialize
from engines import Decoder, adamw, batch, differences, lenient_warnings, param_groups, torch_job

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.deepspeed

STAGES = ["zero0", "zero1", "zero2", "zero3"]


def _run_all(rank: int, world_size: int, folder: str, functions: tuple[Callable[[str], None], ...]) -> None:
    for number, function in enumerate(functions):
        function(f"{folder}/{number}")
        dist.barrier()


def refused(state: Any, path: str, pattern: str, *, loading: bool = False, match: type = errors.StateError) -> None:
    with pytest.raises(match) as caught:
        (bcp.load if loading else bcp.save)(path, state)
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


# ------------------------------------------------------------------------------------------------------------- counters


def _counters(path: str) -> None:
    job = deepspeed_job("zero2", 1)
    job.train(range(3))
    job.model.skipped_steps = 1
    bcp.save(path, job.state)
    model = Decoder(2)
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    engine = initialize(model, adamw(model, 1e-3), config)
    bcp.load(path, {"model": engine, "optimizer": engine.optimizer}, strict="exact")
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 1, job.model.global_samples)
    assert engine.micro_steps == 12, "the next micro-batch must be the first of its step"
    # A model outside of DeepSpeed has no such counters, and its checkpoints have none.
    other = torch_job("ddp", 3)
    bcp.load(path, other.state, cast="any")
    bcp.save(f"{path}-other", other.state)
    report = bcp.load(f"{path}-other", {"model": engine, "optimizer": engine.optimizer}, cast="any")
    assert "model._engine.0" in report.lazy
    assert engine.global_steps == 3


# ---------------------------------------------------------------------------------------------------------- loss scaler


def _loss_scaler(path: str) -> None:
    job = deepspeed_job("zero1-fp16", 1)
    job.train(range(2))
    with torch.no_grad():
        job.optimizer.loss_scaler.update_scale(True)  # an overflow, with hysteresis left
        job.optimizer.loss_scaler.update_scale(True)
    scaler = job.optimizer.loss_scaler
    bcp.save(path, job.state)
    same = deepspeed_job("zero2-offload", 2)
    bcp.load(path, same.state, strict="exact")
    assert vars(same.optimizer.loss_scaler) == vars(scaler)
    assert scaler.cur_scale == 128
    fused = deepspeed_job("zero0-fp16", 2)
    bcp.load(path, fused.state)
    assert fused.optimizer.loss_scale_config.cur_scale == 128
    assert fused.optimizer.loss_scale_config.last_overflow_iter == scaler.last_overflow_iter
    unscaled = deepspeed_job("zero1", 2)
    bcp.load(path, unscaled.state, cast="any")
    assert unscaled.optimizer.loss_scaler.cur_scale == 1


# ------------------------------------------------------------------------------------------------- schedulers and async


def _with_scheduler(seed: int) -> tuple[Any, dict[str, Any]]:
    model = Decoder(seed)
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "scheduler": scheduler}
    engine = initialize(model, adamw(model, 1e-3), config)
    return engine, {"model": engine, "optimizer": engine.optimizer, "lr_scheduler": engine.lr_scheduler}


def _scheduler(path: str) -> None:
    engine, state = _with_scheduler(1)
    train(engine, range(3))
    handle = bcp.save(path, state, async_save=True)
    handle.staged()
    rates, losses = engine.get_lr(), train(engine, range(3, 6))
    handle.result(timeout=60)
    other, state = _with_scheduler(2)
    bcp.load(path, state, strict="exact")
    assert other.get_lr() == rates
    assert train(other, range(3, 6)) == losses


# ----------------------------------------------------------------------------------------------- models without masters


def _model_only(path: str) -> None:
    source = deepspeed_job("zero2", 1)
    source.train(range(2))
    bcp.save(path, {"model": source.model})
    for kind in (*STAGES, "zero1-fp32", "zero3-offload"):
        job = deepspeed_job(kind, 2)
        bcp.load(path, {"model": job.model})
        form = job.full_form()
        for name, param in source.full_form().items():
            if name.count(".") < 1 or not name.rsplit(".", 1)[1].startswith(("exp_avg", "step")):
                assert torch.equal(form[name], param.bfloat16().float()), (kind, name)
        # What the optimizer kept would otherwise return in the next step.
        job.train(range(2, 3))
        assert max((job.full_form()[n] - form[n]).abs().max() for n in form if n.endswith("weight")) < 0.02


def _masters_keep_their_precision(path: str) -> None:
    job = deepspeed_job("zero1", 1)
    job.train(range(2))
    form = job.full_form()
    bcp.save(path, {"model": job.model})
    bcp.load(path, {"model": job.model})
    assert differences(job.full_form(), form) == [], "a load of the same values must not round the master weights"


def _module_inside(path: str) -> None:
    """The module of an engine can be saved; loading it alone would be undone by the masters."""
    for kind in ("zero2", "zero3"):
        job = deepspeed_job(kind, 1)
        job.train(range(2))
        bcp.save(path, {"model": job.model.module})
        expected = {name: tensor for name, tensor in bcp.open(path).items() if "blocks" in name}
        assert len(expected) == 18
        other = torch_job("ddp", 2)
        bcp.load(path, {"model": other.model})
        form = other.full_form()
        for name, param in job.full_form().items():
            if name in form and name.count(".") and "exp_avg" not in name and "step" not in name:
                assert torch.equal(form[name], param.bfloat16().float()), name
        refused({"model": job.model.module}, path, "engine", loading=True)


# ----------------------------------------------------------------------------------------------------------- selections


def _trainable_only(path: str) -> None:
    for kind in ("zero1", "zero3"):
        job = deepspeed_job(kind, 1)
        job.train(range(2))
        bcp.save(path, job.state, options=bcp.SaveOptions(trainable_only=True))
        assert "model.position" not in bcp.open(path)
        other = deepspeed_job("zero3", 2)
        position = other.full_form()["position"]
        report = bcp.load(path, other.state)
        assert report.left_out == ["model.position"]
        assert differences(other.full_form(), {**job.full_form(), "position": position}) == []


# ----------------------------------------------------------------------------------------------------- other optimizers


class Lion(torch.optim.Optimizer):
    """Has one moment, and no step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.add_((moment * first + param.grad * (1 - first)).sign(), alpha=-group["lr"])
                    moment.mul_(second).add_(param.grad, alpha=1 - second)


def _lion(path: str) -> None:
    def make(model: Any, lr: float) -> Lion:
        return Lion(param_groups(model), lr)

    form = None
    for number, kind in enumerate(("zero1", "zero3", "zero0", "zero2-offload", "zero1")):
        job = deepspeed_job(kind, number, make=make)
        if form is None:
            job.train(range(2))
            form = job.full_form()
        else:
            bcp.load(f"{path}/{number - 1}", job.state, cast="any")
        assert differences(job.full_form(), form) == [], kind
        assert {name.rsplit(".", 1)[1] for name in form if "exp" in name} == {"exp_avg"}
        bcp.save(f"{path}/{number}", job.state)


def _muon(path: str) -> None:
    for stage in (1, 2, 3):
        engine = muon_engine(stage, 1)
        train(engine, range(2))
        state = {"model": engine, "optimizer": engine.optimizer}
        bcp.save(f"{path}/{stage}", state)
        losses = train(engine, range(2, 5))
        checkpoint = bcp.open(f"{path}/{stage}")
        moments = [name for name in checkpoint if name.endswith("momentum_buffer")]
        assert len(moments) == 8
        assert all(checkpoint[name].load().count_nonzero() for name in moments)
        for other in {1, stage, 3}:
            again = muon_engine(other, 2)
            bcp.load(f"{path}/{stage}", {"model": again, "optimizer": again.optimizer}, cast="any")
            found = train(again, range(2, 5))
            assert max(abs(a - b) for a, b in zip(found, losses)) <= (0 if other == stage else 3e-3), (stage, other)


# -------------------------------------------------------------------------------------------------------------- experts


def _experts(path: str) -> None:
    """Expert parallelism over two ranks, over one rank, and back, at several stages."""
    losses: list[float] = []
    for number, (expert_parallel, stage) in enumerate([(2, 1), (2, 2), (1, 2), (1, 0), (2, 0), (2, 1)]):
        engine = expert_engine(expert_parallel, stage, number)
        state = {"model": engine, "optimizer": engine.optimizer}
        if number:
            bcp.load(f"{path}/{number - 1}", state)
        else:
            expert_steps(engine, range(2))
        names = [group["name"] for group in engine.optimizer.param_groups if group.get("moe")]
        assert all(name.startswith(f"ep_size_{expert_parallel}") for name in names), names
        assert names
        bcp.save(f"{path}/{number}", state)
        first, now = bcp.open(f"{path}/0"), bcp.open(f"{path}/{number}")
        assert first.keys() == now.keys()
        assert "optimizer.state.moe.deepspeed_moe.experts.deepspeed_experts.3.0.weight.master" in now
        assert [name for name in first if not torch.equal(first[name].load(), now[name].load())] == []
        found = expert_steps(engine, range(2, 5))
        losses = losses or found
        assert max(abs(a - b) for a, b in zip(found, losses)) < 1e-3, (expert_parallel, stage)


# ------------------------------------------------------------------------------------------------------------- refusals


def _refusals(path: str) -> None:
    job = deepspeed_job("zero3", 1)
    job.train(range(1))
    bcp.save(path, job.state)
    refused({"optimizer": job.optimizer}, path, "pass the engine in the same state")
    refused({"optimizer": job.optimizer}, path, "pass the engine in the same state", loading=True)
    inner = {"model": job.model, "optimizer": job.optimizer.optimizer}
    refused(inner, path, "'optimizer': this optimizer is inside .* pass engine.optimizer")
    refused(inner, path, "pass engine.optimizer", loading=True)

    import deepspeed

    with lenient_warnings(), deepspeed.zero.GatheredParameters([job.model.module.head.weight]):
        refused(job.state, path, "embedding.weight: ZeRO-3 has gathered this parameter")
        refused(job.state, path, "embedding.weight: ZeRO-3 has gathered", loading=True)
    hook = job.model.module.blocks[1].register_forward_hook(
        lambda *arguments: refused(job.state, path, "ZeRO-3 has gathered")
    )
    with lenient_warnings():
        job.backward(job.model(batch(1)))
        job.update()
    hook.remove()
    bcp.save(path, job.state)

    job.optimizer.backup_optimizer = job.optimizer.optimizer
    refused(job.state, path, "ratio")
    del job.optimizer.backup_optimizer
    job.optimizer.swap_optimizer = True
    refused(job.state, path, "NVMe")
    job.optimizer.swap_optimizer = False
    job.model.pipeline_parallelism = True
    refused(job.state, path, "pipeline parallelism")
    job.model.pipeline_parallelism, job.model.mp_world_size = False, 2
    refused(job.state, path, "model parallelism")

    job = deepspeed_job("zero2", 1)
    job.model.module.norm.weight.data = torch.ones(8, dtype=torch.bfloat16)
    refused(job.state, path, r"shape \(8,\) was moved out of the memory")


def _gathered_copies_are_dropped(path: str) -> None:
    """After a forward pass, ZeRO-3 may keep gathered parameters. The next one must compute with the loaded values."""
    job = deepspeed_job("zero3", 1)
    job.train(range(2))
    bcp.save(path, job.state)
    losses = job.train(range(2, 3))
    with lenient_warnings(), torch.no_grad():
        bcp.load(path, job.state)
        job.model.eval()
        assert job.model(batch(2)).item() > 0
        job.model.train()
    bcp.load(path, job.state)
    assert job.train(range(2, 3)) == losses


@pytest.mark.parametrize(
    "functions",
    [
        (_counters, _loss_scaler, _scheduler, _model_only, _masters_keep_their_precision, _module_inside),
        (_trainable_only, _lion, _experts, _refusals, _gathered_copies_are_dropped),
        pytest.param((_muon,), marks=pytest.mark.full),  # DeepSpeed compiles an extension for it
    ],
)
def test_engines(functions: tuple[Callable[[str], None], ...], tmp_path: Path) -> None:
    with RankPool(2) as pool:
        pool.run(_run_all, str(tmp_path), functions, timeout_s=200)
