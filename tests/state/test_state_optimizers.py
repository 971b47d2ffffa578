"""Optimizers of every kind through save and load: equal state, and an equal next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing.ranks import RankPool

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw, rate as tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                ramp = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.copy_(torch.sin(ramp + number + 10 * seed))


def wrapped(model: nn.Module) -> nn.Module:
    return fully_shard(model) if dist.is_initialized() else model


def step(*optimizers: optim.Optimizer, skip: tuple[torch.Tensor, ...] = ()) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not any(parameter is other for other in skip):
                    parameter.grad = (parameter.detach() * 0.5 + 0.25).clone()
        optimizer.step()
        optimizer.zero_grad()


def bits(value: Any) -> Any:
    """A tensor's type, shape and bytes, or the value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    local = value.to_local() if isinstance(value, DTensor) else value.detach()
    flat = local.contiguous().reshape(-1)
    return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else [])


def held(model: nn.Module, *optimizers: optim.Optimizer) -> dict[str, Any]:
    """Every bit of the model and the optimizers, types of numbers included."""
    found: dict[str, Any] = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            found[f"{number}.{at}"] = {key: bits(value) for key, value in group.items() if key != "params"}
            for index, parameter in enumerate(group["params"]):
                found[f"{number}.{at}.{index}"] = {k: bits(v) for k, v in optimizer.state.get(parameter, {}).items()}
    return found


def _round_trip(rank: int, world_size: int, kind: str, path: str) -> None:
    model = wrapped(Net())
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(optimizer)
    step(optimizer)
    before = held(model, optimizer)
    bcp.save(path, {"model": model, "optimizer": optimizer})
    assert held(model, optimizer) == before, "taking a checkpoint changed something"
    step(optimizer)
    after = held(model, optimizer)
    for earlier_steps in (0, 1):
        other = wrapped(Net(seed=1))
        target = OPTIMIZERS[kind](other.parameters())
        for group in target.param_groups:
            group["lr"] = group["lr"] * 7
        for _ in range(earlier_steps):
            step(target)
        report = bcp.load(path, {"model": other, "optimizer": target})
        assert not report.lazy
        assert held(other, target) == before
        step(target)
        assert held(other, target) == after


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_a_plain_model(kind: str, tmp_path: Path) -> None:
    _round_trip(0, 1, kind, str(tmp_path / "checkpoint"))


# torch's Adafactor cannot step a sharded matrix: it squares a norm over the sharded dimension in place.
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "adafactor"])
@pytest.mark.sampled(5)
def test_on_fsdp2(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(_round_trip, kind, str(tmp_path / "checkpoint"), world_size=2)


def test_a_fresh_optimizer_stays_without_state(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    before, random = held(model, optimizer), torch.get_rng_state()
    bcp.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    assert held(model, optimizer) == before
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    # A load restores the absence of state, even if the target has some.
    step(optimizer)
    bcp.load(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    assert held(model, optimizer) == before


def _gan() -> dict[str, Any]:
    generator, critic = Net(seed=1), Net(seed=2)
    return {
        "generator": generator,
        "critic": critic,
        "generator_optimizer": optim.Adam(generator.parameters(), lr=0.1),
        "critic_optimizer": optim.SGD(critic.parameters(), lr=0.2, momentum=0.9),
    }


def _gan_held(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [held(state[name], state[f"{name}_optimizer"]) for name in ("generator", "critic")]


def test_two_models_with_an_optimizer_each(tmp_path: Path) -> None:
    state = _gan()
    step(state["generator_optimizer"], state["critic_optimizer"])
    bcp.save(tmp_path / "checkpoint", state)
    other = _gan()
    bcp.load(tmp_path / "checkpoint", other)
    assert _gan_held(other) == _gan_held(state)
    # Load only one of the two.
    half = _gan()
    bcp.load(tmp_path / "checkpoint", {name: half[name] for name in ("critic", "critic_optimizer")})
    assert _gan_held(half)[1] == _gan_held(state)[1]


def _split(model: Net) -> list[optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [optim.AdamW(matrices, lr=0.1), optim.AdamW(others, lr=0.01)]


def test_a_list_of_optimizers(tmp_path: Path) -> None:
    model = Net()
    optimizers = _split(model)
    step(*optimizers)
    bcp.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizers})
    other = Net(seed=1)
    targets = _split(other)
    bcp.load(tmp_path / "checkpoint", {"model": other, "optimizer": targets})
    assert held(other, *targets) == held(model, *optimizers)
    # The same parameters under one optimizer with two groups.
    matrices, vectors = (optimizer.param_groups[0]["params"] for optimizer in _split(other))
    one = optim.AdamW([{"params": vectors}, {"params": matrices}])
    bcp.load(tmp_path / "checkpoint", {"model": other, "optimizer": one})
    assert [group["lr"] for group in one.param_groups] == [0.01, 0.1]
    for optimizer in targets:
        for parameter, state in optimizer.state.items():
            assert {k: bits(v) for k, v in one.state[parameter].items()} == {k: bits(v) for k, v in state.items()}


def test_an_optimizer_without_its_model_is_a_clear_error(tmp_path: Path) -> None:
    optimizer = optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(errors.StateError, match=r"has no name\. Add the module that owns it to the state"):
        bcp.save(tmp_path / "checkpoint", {"optimizer": optimizer})
    with pytest.raises(errors.CheckpointNotFoundError):
        bcp.open(tmp_path / "checkpoint")
    # An optimizer built from named parameters matches them by name.
    model = Net()
    named = optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    step(named)
    bcp.save(tmp_path / "checkpoint", {"optimizer": named})
    assert "optimizer.state.up.weight.momentum_buffer" in bcp.open(tmp_path / "checkpoint")


def test_parameters_that_are_frozen_or_never_had_a_gradient(tmp_path: Path) -> None:
    model = Net()
    model.up.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    step(optimizer, skip=(model.gain,))
    bcp.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    before = held(model, optimizer)
    # Load into an optimizer without the frozen parameters, and back.
    other = Net(seed=1)
    some = optim.AdamW([p for name, p in other.named_parameters() if not name.startswith("up")], lr=0.3)
    bcp.load(tmp_path / "checkpoint", {"model": other, "optimizer": some})
    assert other.gain not in some.state
    assert bits(some.state[other.down.weight]["exp_avg"]) == bits(optimizer.state[model.down.weight]["exp_avg"])
    bcp.save(tmp_path / "part", {"model": other, "optimizer": some})
    third = Net(seed=2)
    everything = optim.AdamW(third.parameters(), lr=0.3)
    step(everything)
    kept = copy.deepcopy(everything.state[third.up.weight])
    report = bcp.load(tmp_path / "part", {"model": third, "optimizer": everything})
    assert any("up.weight" in name for name in report.lazy)
    assert bits(everything.state[third.up.weight]["exp_avg"]) == bits(kept["exp_avg"])
    # Unfrozen: a load of the first checkpoint removes the existing state.
    bcp.load(tmp_path / "checkpoint", {"model": third, "optimizer": everything})
    assert held(third, everything) == before


def test_a_parameter_that_the_saved_optimizer_did_not_have_is_noted(tmp_path: Path) -> None:
    """For example a head that was tied to the embedding when it was saved."""

    def trained(*, tie: bool) -> dict[str, Any]:
        model = nn.ModuleDict({"embed": nn.Linear(3, 5, bias=False), "head": nn.Linear(3, 5, bias=False)})
        if tie:
            model["head"].weight = model["embed"].weight
        optimizer = optim.AdamW(model.parameters())
        if tie:
            step(optimizer)
        return {"model": model, "optimizer": optimizer}

    bcp.save(tmp_path, trained(tie=True))
    assert bcp.load(tmp_path, trained(tie=True)).notes == []
    (note,) = bcp.load(tmp_path, trained(tie=False)).notes
    assert note.endswith("their state stays as it is: head.weight")
