"""Live optimizers and their state dicts load what the other has saved: the next steps are bitwise equal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(31, of=__name__)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.down = nn.Linear(6, 3)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                ramp = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
                parameter.copy_(torch.sin(ramp + number + 10 * seed))


def adam(model: nn.Module, lr: Any) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=lr, amsgrad=True)


def named_adam(model: nn.Module, lr: Any) -> optim.Optimizer:
    return optim.Adam(model.named_parameters(), lr=lr, amsgrad=True)


def tensor_adam(model: nn.Module, lr: Any) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=torch.tensor(lr), amsgrad=True, foreach=False)


def step(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 0.5 + 0.25).clone()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, list[Any]]:
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: tensor.detach().flatten().tolist() for name, tensor in whole.items()}


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# How a section is made of a model and its optimizer, and how torch puts a loaded section into the optimizer.
FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any, Any], None]]] = {
    "live": (lambda model, optimizer: optimizer, lambda model, optimizer, section: None),
    "numbers": (
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer, section: optimizer.load_state_dict(section),
    ),
    "names": (
        lambda model, optimizer: get_optimizer_state_dict(model, optimizer),
        lambda model, optimizer, section: set_optimizer_state_dict(model, optimizer, section),
    ),
    "flat names": (
        lambda model, optimizer: get_optimizer_state_dict(model, optimizer, options=FLAT),
        lambda model, optimizer, section: set_optimizer_state_dict(model, optimizer, section, options=FLAT),
    ),
}


@pytest.mark.parametrize("make", [adam, named_adam, tensor_adam], ids=["plain", "named", "rate as tensor"])
@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", [form for form in FORMS if form != "flat names"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "warm"])
def test_every_form_loads_every_form(make: Any, saved: str, loaded: str, steps: int, tmp_path: Path) -> None:
    if saved == "flat names" and make is named_adam:
        pytest.skip("torch does not flatten lists of names")
    model, other = Net(), Net(seed=1)
    optimizer, target = make(model, 0.1), make(other, 0.9)
    step(model, optimizer)
    step(other, target, steps)
    bcp.save(tmp_path, {"model": model, "optimizer": FORMS[saved][0](model, optimizer)})
    make_section, put = FORMS[loaded]
    state = {"model": other, "optimizer": make_section(other, target)}
    report = bcp.load(tmp_path, state)
    assert not report.lazy
    put(other, target, state["optimizer"])
    assert float(target.param_groups[0]["lr"]) == pytest.approx(0.1)
    step(model, optimizer)
    step(other, target)
    assert weights(other) == weights(model)


def test_names_without_the_model(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    optimizer, target = adam(model, 0.1), adam(other, 0.9)
    step(model, optimizer)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    section = get_optimizer_state_dict(other, target)
    bcp.load(tmp_path, {"optimizer": section})
    expected = get_optimizer_state_dict(model, optimizer)
    assert section["param_groups"] == expected["param_groups"]
    for name, entries in expected["state"].items():
        assert all(torch.equal(section["state"][name][key], value) for key, value in entries.items())
    # State that only one side has.
    bare = {"state": {}, "param_groups": copy.deepcopy(section["param_groups"])}
    bcp.load(tmp_path, {"optimizer": bare}, strict="exact")
    assert all(
        torch.equal(bare["state"][name][key], value)
        for name, entries in expected["state"].items()
        for key, value in entries.items()
    )


def _sharded(seed: int, lr: float) -> tuple[nn.Module, optim.Optimizer]:
    model: nn.Module = Net(seed)
    if dist.is_initialized():
        model = fully_shard(model)
    return model, adam(model, lr)


def _save(rank: int, world_size: int, path: str, form: str) -> dict[str, list[Any]]:
    model, optimizer = _sharded(0, 0.1)
    step(model, optimizer)
    bcp.save(path, {"model": model, "optimizer": FORMS[form][0](model, optimizer)})
    step(model, optimizer)
    return weights(model)


def _load(rank: int, world_size: int, path: str, form: str) -> dict[str, list[Any]]:
    model, optimizer = _sharded(1, 0.9)
    make_section, put = FORMS[form]
    state = {"model": model, "optimizer": make_section(model, optimizer)}
    bcp.load(path, state)
    put(model, optimizer, state["optimizer"])
    step(model, optimizer)
    return weights(model)


@pytest.mark.parametrize(
    ("saved", "loaded"), [*itertools.permutations(["live", "numbers", "names"], 2), ("flat names", "live")]
)
def test_sharded_on_two_ranks_and_whole_on_one(saved: str, loaded: str, rank_pool: RankPool, tmp_path: Path) -> None:
    path, single = str(tmp_path / "two"), str(tmp_path / "one")
    expected = rank_pool.run(_save, path, saved, world_size=2)[0]
    assert rank_pool.run(_load, path, loaded, world_size=2) == [expected] * 2
    assert _load(0, 1, path, loaded) == expected
    assert _save(0, 1, single, saved) == expected
    assert rank_pool.run(_load, single, loaded, world_size=2) == [expected] * 2


class Nested(optim.SGD):
    """State of lists, matrices of other shapes, numbers and None, as second-order optimizers have it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                state.setdefault("factors", [torch.eye(n) for n in param.shape] + [None])[0].mul_(1.5)
                param.data.sub_(state["exp_avg"] * state["factors"][0].sum() * 0.01)


@pytest.mark.parametrize("loaded", ["numbers", "live"])
@pytest.mark.parametrize("saved", ["numbers", "live"])
def test_nested_state_and_empty_groups(saved: str, loaded: str, tmp_path: Path) -> None:
    def made(seed: int, lr: float) -> tuple[Net, optim.Optimizer]:
        model = Net(seed)
        optimizer = Nested(model.parameters(), lr=lr)
        optimizer.add_param_group({"params": [], "lr": lr / 2})
        return model, optimizer

    (model, optimizer), (other, target) = made(0, 0.5), made(1, 9.0)
    step(model, optimizer)
    step(other, target, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": FORMS[saved][0](model, optimizer)})
    make_section, put = FORMS[loaded]
    state = {"model": other, "optimizer": make_section(other, target)}
    if (saved, loaded) == ("live", "numbers"):
        with pytest.raises(MismatchError, match="it is unknown which they are"):  # two groups
            bcp.load(tmp_path, state)
        return
    bcp.load(tmp_path, state)
    put(other, target, state["optimizer"])
    assert [group["lr"] for group in target.param_groups] == [0.5, 0.25]
    assert {type(entry["step"]) for entry in target.state.values()} == {int}
    step(model, optimizer)
    step(other, target)
    assert weights(other) == weights(model)


def test_parameters_without_state(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    optimizer, target = adam(model, 0.1), adam(other, 0.9)
    model.down.bias.requires_grad_(False)
    for parameter in (model.up.weight, model.up.bias, model.down.weight):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    step(other, target)
    bcp.save(tmp_path / "numbers", {"model": model, "optimizer": optimizer.state_dict()})
    bcp.save(tmp_path / "live", {"model": model, "optimizer": optimizer})
    for path, section in (("numbers", target), ("live", get_optimizer_state_dict(other, target))):
        bcp.load(tmp_path / path, {"model": other, "optimizer": section}, strict="exact")
        names = section["state"].keys() if isinstance(section, dict) else [*section.state]
        assert len(names) == 3


def test_another_tree_is_no_optimizer(tmp_path: Path) -> None:
    model = Net()
    bcp.save(tmp_path, {"model": model, "optimizer": {"lr": 0.1, "state": {"a": 1, "b": 2}}})
    optimizer = adam(model, 0.1)
    step(model, optimizer)
    with pytest.raises(MismatchError):
        bcp.load(tmp_path, {"model": model, "optimizer": optimizer})


def test_groups_of_names_may_be_split(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    optimizer = adam(model, 0.1)
    step(model, optimizer)
    bcp.save(tmp_path, {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)})
    target = optim.Adam([{"params": other.down.parameters()}, {"params": other.up.parameters()}], lr=0.9)
    bcp.load(tmp_path, {"model": other, "optimizer": target})
    step(model, optimizer)
    step(other, target)
    assert weights(other) == weights(model)


def test_numbers_that_may_mean_other_parameters_are_refused(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    optimizer = adam(model, 0.1)
    step(model, optimizer)
    bcp.save(tmp_path / "numbers", {"model": model, "optimizer": optimizer.state_dict()})
    bcp.save(tmp_path / "live", {"model": model, "optimizer": optimizer})
    split = optim.Adam([{"params": other.up.parameters()}, {"params": other.down.parameters()}], lr=0.9)
    swapped = optim.Adam(list(reversed(list(other.parameters()))), lr=0.9)
    with pytest.raises(MismatchError, match=r"\d+ entries do not have the shapes .*state\.\S+\.exp_avg"):
        bcp.load(tmp_path / "numbers", {"model": other, "optimizer": swapped})
    for section in (split.state_dict(), optim.Adam(other.up.parameters()).state_dict()):
        with pytest.raises(MismatchError, match=r"numbers its \d parameters, and it is unknown which they are"):
            bcp.load(tmp_path / "live", {"model": other, "optimizer": section})
    with pytest.raises(MismatchError, match="it is unknown which they are"):
        bcp.load(tmp_path / "live", {"optimizer": adam(other, 0.9).state_dict()})
    assert not split.state
    assert not swapped.state
    # Every assignment by number is reported.
    report = bcp.load(tmp_path / "numbers", {"model": other, "optimizer": adam(other, 0.9)})
    assert any("assigned to the target's in order" in note for note in report.notes)


def test_keys_that_are_neither_numbers_nor_names_count_like_numbers(tmp_path: Path) -> None:
    model = Net()
    optimizer, target = optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.9)
    found = optimizer.state_dict()
    found["param_groups"][0]["params"] = [(key,) for key in found["param_groups"][0]["params"]]
    bcp.save(tmp_path / "keys", {"model": model, "optimizer": found})
    bcp.save(tmp_path / "live", {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path / "keys", {"model": model, "optimizer": target})
    assert target.param_groups[0]["lr"] == 0.1
    found["param_groups"][0]["lr"] = 0.9
    bcp.load(tmp_path / "live", {"model": model, "optimizer": found})
    assert found["param_groups"][0]["lr"] == 0.1


def test_groups_that_fit_in_several_ways_are_refused(tmp_path: Path) -> None:
    model, other = (nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("up", "down")}) for _ in range(2))
    optimizer = optim.Adam([{"params": model["down"].parameters()}, {"params": model["up"].parameters()}])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    bcp.save(tmp_path / "numbers", {"model": model, "optimizer": optimizer.state_dict()})
    target = adam(other, 0.9)
    with pytest.raises(MismatchError, match=r"in groups of \[1, 1\], .* has groups of \[2\].*do not allow exactly one"):
        bcp.load(tmp_path / "numbers", {"model": other, "optimizer": target})
    assert not target.state


def test_the_state_of_another_class_is_missing_by_name(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    bcp.save(tmp_path, {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)})
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, {"model": model, "optimizer": adam(model, 0.1)})
    assert ("missing", "optimizer.state.up.weight.exp_avg_sq") in {fault[:2] for fault in caught.value.faults}
