"""DeepSpeed engines with Muon and with experts, and their steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed_jobs import initialize
from engines import Decoder, batch, lenient_warnings


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    with lenient_warnings():
        for step in steps:
            loss = engine(batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def muon_engine(stage: int, seed: int) -> Any:
    model = Decoder(seed)
    for name, param in model.named_parameters():
        param.use_muon = param.ndim == 2 and "blocks" in name  # type: ignore[attr-defined]
    optimizer = {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}
    zero = {"stage": stage, "memory_efficient_linear": False, "reduce_scatter": False}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": optimizer}
    params = [param for param in model.parameters() if param.requires_grad]
    return initialize(model, None, config, model_parameters=params)


class Experts(torch.nn.Module):
    def __init__(self, expert_parallel: int, seed: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 6)
        expert = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 6))
        self.moe = MoE(6, expert, num_experts=4, ep_size=expert_parallel, use_rts=False)
        torch.manual_seed(10 * seed + dist.get_rank() % expert_parallel)
        for part in self.moe.deepspeed_moe.experts.parameters():
            torch.nn.init.normal_(part, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.moe(self.first(x))
        return hidden.float().square().mean() + 0.01 * balance.float()  # type: ignore[no-any-return]


def expert_engine(expert_parallel: int, stage: int, seed: int) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    with lenient_warnings():
        model = Experts(expert_parallel, seed)
        groups = {"params": list(model.parameters()), "name": "parameters"}
        optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=1e-2)
    return initialize(model, optimizer, {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}})


def expert_steps(engine: Any, steps: range) -> list[float]:
    losses = []
    with lenient_warnings():
        for step in steps:
            torch.manual_seed(10 * step + dist.get_rank())
            loss = engine(torch.randn(8, 4, dtype=torch.bfloat16))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
