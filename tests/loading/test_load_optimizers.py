"""Optimizers whose groups, parameters or implementation have changed since the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import plain_model, stepped
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: dict(entries) for parameter, entries in optimizer.state.items()}


def test_a_parameter_without_gradient_has_no_state_on_either_side(tmp_path: Path) -> None:
    """Missing state is neither an error nor created, and the load removes the state that the target had."""

    def run(value: float, idle: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain_model(value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for name, parameter in model.named_parameters():
            if name != idle:
                parameter.grad = parameter.detach().clone()
        optimizer.step()
        return model, optimizer

    model, optimizer = run(1.0, "1.bias")
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    for idle in ("1.bias", "0.weight", ""):
        other, target = run(9.0, idle)
        bcp.load(tmp_path, {"model": other, "optimizer": target})
        loaded, stored = _named_state(other, target), _named_state(model, optimizer)
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[n][k], stored[n][k]) for n in stored for k in stored[n])


def _frozen_run(value: float, frozen: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An optimizer of the parameters that are not frozen."""
    model = plain_model(value)
    model.get_parameter(frozen).requires_grad_(False) if frozen else None
    live = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(live, lr=0.5)
    for parameter in live:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def test_frozen_when_saved_and_trained_now(tmp_path: Path) -> None:
    model, optimizer = _frozen_run(1.0, "0.weight")
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = _frozen_run(9.0, "")
    own = {key: value.clone() for key, value in target.state[other[0].weight].items()}
    report = bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert torch.equal(other[0].weight, model[0].weight)
    assert any("0.weight" in name for name in report.lazy)
    assert all(torch.equal(target.state[other[0].weight][key], value) for key, value in own.items())
    assert torch.equal(target.state[other[1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])


def test_trained_when_saved_and_frozen_now(tmp_path: Path) -> None:
    model, optimizer = _frozen_run(1.0, "")
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = _frozen_run(9.0, "0.weight")
    report = bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert not report.unexpected
    assert other[0].weight not in target.state
    assert torch.equal(other[0].weight, model[0].weight)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.0\.weight\.exp_avg"):
        bcp.load(tmp_path, {"model": other, "optimizer": target}, strict="exact")


def _grouped(value: float, groups: list[tuple[list[str], float]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_model(value)
    optimizer = torch.optim.AdamW(
        [{"params": [model.get_parameter(name) for name in names], "lr": lr} for names, lr in groups]
    )
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def test_groups_reordered_split_and_merged(tmp_path: Path) -> None:
    weights, biases = ["0.weight", "1.weight"], ["0.bias", "1.bias"]
    model, optimizer = _grouped(1.0, [(weights, 0.5), (biases, 0.25)])
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    stored = _named_state(model, optimizer)
    for groups, rates in (
        ([(biases, 9.0), (weights, 9.0)], [0.25, 0.5]),
        ([(["1.bias"], 9.0), (["1.weight", "0.weight"], 9.0), (["0.bias"], 9.0)], [0.25, 0.5, 0.25]),
    ):
        other, target = _grouped(9.0, groups)
        bcp.load(tmp_path, {"model": other, "optimizer": target})
        assert [group["lr"] for group in target.param_groups] == rates
        loaded = _named_state(other, target)
        assert all(torch.equal(loaded[n][k], stored[n][k]) for n in stored for k in stored[n])
    # Groups with different hyper-parameters cannot be merged.
    other, target = _grouped(9.0, [(weights + biases, 9.0)])
    before = _named_state(other, target)["0.bias"]["exp_avg"].clone()
    with pytest.raises(MismatchError, match=r"split the group as it was") as caught:
        bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert "lr = 0.25" in str(caught.value)
    assert torch.equal(_named_state(other, target)["0.bias"]["exp_avg"], before)
    bcp.load(tmp_path, {"model": other, "optimizer": target}, exclude=["optimizer.param_groups.*"])
    assert target.param_groups[0]["lr"] == 9.0
    # Groups with equal hyper-parameters can.
    model, optimizer = _grouped(1.0, [(weights, 0.5), (biases, 0.5)])
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert target.param_groups[0]["lr"] == 0.5


_KINDS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("loaded", _KINDS)
@pytest.mark.parametrize("stored", ["plain", "fused"])
def test_one_implementation_loads_the_state_of_another(tmp_path: Path, stored: str, loaded: str) -> None:
    def run(value: float, kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain_model(value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **_KINDS[kind])
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return model, optimizer

    model, optimizer = run(1.0, stored, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    for steps in (0, 1) if loaded != "capturable" else (0,):  # that one steps on accelerators only
        other, target = run(9.0, loaded, steps)
        bcp.load(tmp_path, {"model": other, "optimizer": target})
        for flag in ("foreach", "fused", "capturable", "differentiable"):
            assert bool(target.param_groups[0][flag]) == _KINDS[loaded].get(flag, False)
        for name, entries in _named_state(other, target).items():
            assert float(entries["step"]) == 2.0
            assert torch.equal(entries["exp_avg"], optimizer.state[model.get_parameter(name)]["exp_avg"])
        if loaded != "capturable":
            for parameter in other.parameters():
                parameter.grad = torch.ones_like(parameter)
            target.step()


def test_an_exhausted_scheduler_and_a_scaler_round_trip(tmp_path: Path) -> None:
    model = plain_model()
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    scheduler.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    other = plain_model(9.0)
    target = stepped(other, 2)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(target, 10)
    bcp.load(tmp_path, {"model": other, "optimizer": target, "scheduler": theirs})
    assert theirs.state_dict() == scheduler.state_dict()
    assert target.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class _Nested(torch.optim.SGD):
    """State with structure below its key, as second-order optimizers have."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = [parameter.detach() + 1, {"deep": parameter.detach() + 2}]


def test_nested_state_follows_a_renamed_parameter(tmp_path: Path) -> None:
    def made(name: str, value: float) -> tuple[nn.Module, _Nested]:
        module = nn.Module()
        inner = nn.Module()
        inner.register_parameter("w", nn.Parameter(torch.full((2, 3), value)))
        module.add_module(name, inner)
        return module, _Nested(module.parameters(), lr=0.1)

    old, old_optimizer = made("old", 1.0)
    old_optimizer.step()
    bcp.save(tmp_path, {"model": old, "optimizer": old_optimizer})
    new, new_optimizer = made("new", 5.0)
    bcp.load(tmp_path, {"model": new, "optimizer": new_optimizer}, rename={"model.old.w": "model.new.w"})
    first, second = new_optimizer.state[new.new.w]["factors"]
    assert first.eq(2).all()
    assert second["deep"].eq(3).all()


class Derived(torch.optim.AdamW):
    """A subclass, as users write it."""


class Other(torch.optim.Optimizer):
    """Has the entries of SGD, with another meaning."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})


def _trained(make: Any, value: float, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_model(value)
    optimizer = make(model.parameters())
    _step(model, optimizer, steps)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.25
        optimizer.step()


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "warm"])
@pytest.mark.parametrize("strict", ["lenient", "strict", "exact"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.optim.SGD, torch.optim.Adam),
        (_momentum, torch.optim.Adam),
        (_momentum, Other),
        (torch.optim.Adam, torch.optim.NAdam),
        (torch.optim.Adam, torch.optim.RAdam),
        (torch.optim.AdamW, torch.optim.SGD),
    ],
)
def test_state_of_another_class_is_refused(saved: Any, loaded: Any, strict: Any, steps: int, tmp_path: Path) -> None:
    model, optimizer = _trained(saved, 1.0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = _trained(loaded, 9.0, steps if loaded is not Other else 0)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    names = rf"saved by torch\.\S+{type(optimizer).__name__}, loaded into \S+{type(target).__name__}"
    with pytest.raises(MismatchError, match=names) as caught:
        bcp.load(tmp_path, {"model": other, "optimizer": target}, strict=strict)
    assert ("value", "0.weight") in {fault[:2] for fault in caught.value.faults}
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    # The model alone can be loaded.
    bcp.load(tmp_path, {"model": other})


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.AdamW, Derived),
        (Derived, torch.optim.Adam),
        (Derived, Derived),
    ],
)
def test_state_of_a_related_class_is_loaded(saved: Any, loaded: Any, tmp_path: Path) -> None:
    model, optimizer = _trained(saved, 1.0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = _trained(loaded, 9.0, 0)
    bcp.load(tmp_path, {"model": other, "optimizer": target}, strict="exact")
    assert all(
        torch.equal(value, optimizer.state[ours][key])
        for theirs, ours in zip(other.parameters(), model.parameters())
        for key, value in target.state[theirs].items()
    )
    assert len(target.state) == len(optimizer.state)


def test_the_check_of_the_class_can_be_excluded(tmp_path: Path) -> None:
    model, optimizer = _trained(_momentum, 1.0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = _trained(Other, 9.0, 0)
    bcp.load(tmp_path, {"model": other, "optimizer": target}, exclude=["optimizer.class.*"])
    stored = optimizer.state[model[0].weight]["momentum_buffer"]
    assert torch.equal(target.state[other[0].weight]["momentum_buffer"], stored)
    # Without the class, state that torch's optimizers need is missing by name.
    with pytest.raises(MismatchError) as caught:
        bcp.load(
            tmp_path, {"model": other, "optimizer": torch.optim.Adam(other.parameters())}, exclude=["optimizer.class.*"]
        )
    assert ("missing", "optimizer.state.0.weight.exp_avg_sq") in {fault[:2] for fault in caught.value.faults}


def test_the_class_follows_a_renamed_parameter(tmp_path: Path) -> None:
    model, optimizer = _trained(torch.optim.SGD, 1.0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Sequential(*plain_model(9.0)))
    renamed = {f"model.{name}": f"model.0.{name}" for name, _ in model.named_parameters()}
    bcp.load(
        tmp_path,
        {"model": other, "optimizer": torch.optim.SGD(other.parameters())},
        rename=renamed,
        strict={"model": False, "optimizer": "exact"},
    )
    with pytest.raises(MismatchError, match=r"0\.0\.weight: saved by torch\.optim\.sgd\.SGD"):
        bcp.load(tmp_path, {"model": other, "optimizer": torch.optim.Adam(other.parameters())}, rename=renamed)


def test_an_empty_group_keeps_its_hyper_parameters(tmp_path: Path) -> None:
    def made(value: float, rates: tuple[float, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain_model(value)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0])
        for rate in rates[1:]:
            optimizer.add_param_group({"params": [], "lr": rate})
        return model, optimizer

    model, optimizer = made(1.0, (0.5, 0.25, 0.125))
    _step(model, optimizer, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = made(9.0, (9.0, 9.0, 9.0))
    bcp.load(tmp_path, {"model": other, "optimizer": target}, strict="exact")
    assert [group["lr"] for group in target.param_groups] == [0.5, 0.25, 0.125]
    # Groups that one side does not have are no fault, unless everything must match.
    other, target = made(9.0, (9.0,))
    bcp.load(tmp_path, {"model": other, "optimizer": target})
    with pytest.raises(MismatchError, match=r"empty_groups\.0\.1"):
        bcp.load(tmp_path, {"model": other, "optimizer": target}, strict="exact")
    other, target = made(9.0, (9.0, 9.0, 9.0, 9.0))
    report = bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert report.lazy == ["optimizer.empty_groups.0.3"]
    assert [group["lr"] for group in target.param_groups] == [0.5, 0.25, 0.125, 9.0]


def test_arrays_and_lists_among_the_hyper_parameters(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "array": np.array([1.0, float("nan"), 3.0], np.float32),
        "empty": np.zeros((0, 2)),
        "nested": [np.arange(4).reshape(2, 2), {"deep": np.ones(3)}, (float("nan"), "text")],
        "tensors": [torch.tensor(1.5), torch.tensor([2])],
        "nothing": None,
        "scalar": np.float64(0.1),
    }

    def made(value: float, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain_model(value)
        return model, torch.optim.AdamW([{"params": list(model.parameters()), "lr": value, **options}])

    model, optimizer = made(0.5, extra)
    _step(model, optimizer, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    expected = {**extra, "tensors": [1.5, 2]}
    old = {key: np.zeros(9) if isinstance(value, np.ndarray) else None for key, value in extra.items()}
    for options in ({}, old, extra):
        other, target = made(9.0, options)
        bcp.load(tmp_path, {"model": other, "optimizer": target}, strict="exact")
        group = target.param_groups[0]
        assert group["lr"] == 0.5
        group["tensors"] = [float(item) for item in group["tensors"]]  # the target's tensors are filled in place
        for key, value in expected.items():
            np.testing.assert_equal(group[key], value)
            assert type(group[key]) is type(value)
    # Different arrays in one group are named, as other values are.
    model, optimizer = made(0.5, extra)
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({**extra, "params": [moved], "lr": 0.5, "array": np.zeros(3, np.float32)})
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, target = made(9.0, {})
    with pytest.raises(MismatchError, match=r"1\.bias: array = array") as caught:
        bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert len(caught.value.faults) == 1
