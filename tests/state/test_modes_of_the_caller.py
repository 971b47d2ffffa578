"""Modes of torch that the caller has set change nothing: saves, loads, reads and samplers work as without them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from caller_modes import MODES
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.data import ElasticSampler
from bytecheckpoint.testing import time_limit

WAIT_S = time_limit(60)


each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def _sampler() -> ElasticSampler:
    return ElasticSampler(range(40), rank=0, world_size=1, shuffle=True, seed=3)


def _state(seed: int, *, steps: int, meta: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    with torch.device("meta") if meta else nullcontext():
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "rng": bcp.RNGState()}
    state["extra_state"] = {"table": torch.full((5,), float(seed)), "scale": 0.1 * seed, "step": steps}
    for _ in range(steps):
        _step(state)
    return state


def _step(state: dict[str, Any]) -> None:
    for number, parameter in enumerate(state["model"].parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    state["optimizer"].step()


def _contents(state: dict[str, Any]) -> dict[str, Any]:
    found = dict(state["model"].state_dict())
    for number, entries in state["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in entries.items()}
    return found | state["extra_state"]


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@each_mode
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async save"])
def test_a_run_continues(mode: Callable[[], Any], is_async: bool, tmp_path: Path) -> None:
    """Loaded under the mode into an optimizer without state, and trained afterwards."""
    state = _state(1, steps=3)
    drawn = torch.get_rng_state()
    with mode():
        bcp.save(tmp_path, state, async_save=is_async).result(WAIT_S)
    for meta in (False, True):
        other = _state(2, steps=0, meta=meta)
        with mode():
            bcp.load(tmp_path, other)
        assert torch.equal(torch.get_rng_state(), drawn)
        _assert_equal(_contents(other), _contents(state))
        other["model"].eval()(torch.ones(2, 4)).sum().backward()
        expected = _state(1, steps=4)
        _step(other)
        _assert_equal(_contents(other) | {"step": 4}, _contents(expected))


@each_mode
def test_a_checkpoint_is_read_and_exported(mode: Callable[[], Any], tmp_path: Path) -> None:
    state = _state(1, steps=1)
    bcp.save(tmp_path / "c", {name: state[name] for name in ("model", "optimizer")})
    with mode():
        stored = bcp.open(tmp_path / "c")["model.0.weight"]
        whole, part = stored.load(), stored[1:3]
    weight = state["model"][0].weight
    assert torch.equal(whole, weight)
    assert torch.equal(part, weight[1:3])
    assert not whole.is_inference()
    assert whole.requires_grad_().sum().requires_grad


@each_mode
def test_a_sampler_keeps_its_order(mode: Callable[[], Any]) -> None:
    expected = list(_sampler())
    with mode():
        sampler, other = _sampler(), _sampler()
        places = iter(sampler)
        begun = [next(places) for _ in range(10)]
        other.load_state_dict(places.state_dict())  # type: ignore[attr-defined]
        assert [*begun, *other] == expected


def test_a_model_that_was_made_in_inference_mode_is_filled(tmp_path: Path) -> None:
    state = _state(1, steps=1)
    bcp.save(tmp_path, {"model": state["model"].bfloat16()})
    with torch.inference_mode():
        model = _state(2, steps=0)["model"]
        bcp.load(tmp_path, {"model": model})
        found = {name: value.bfloat16() for name, value in model.state_dict().items()}
        _assert_equal(found, {name: value.bfloat16() for name, value in state["model"].state_dict().items()})


def test_what_is_allocated_has_a_dtype() -> None:
    """The default dtype is one of the process: no block can set it for itself."""
    makers = {"empty", "zeros", "ones", "tensor", "full", "eye", "rand", "randn", "linspace"}
    package = Path(bcp.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and node.func.attr in makers and "dtype" not in {one.arg for one in node.keywords}:
                found.append(f"{path.relative_to(package)}:{node.lineno}: torch.{node.func.attr}")
    assert found == []
