"""Saves of a part of the state: ``include``, ``exclude`` and ``trainable_only``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mismatches import faults_of
from small_training import differing, memory, training
from sorted_arguments import saving
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, MismatchError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(8, of=__name__)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


# -- adapters of a frozen model ----------------------------------------------------------------------------------------


class _LoRA(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.base(x) + x @ self.a.T @ self.b.T


def _lora_run(seed: int, layout: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(_LoRA(5, 7), nn.Tanh(), _LoRA(7, 2))
    if layout == "fsdp2" and dist.is_initialized():
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    if layout == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    # All parameters, as many scripts pass them: frozen ones have hyper-parameters, but no state.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for step in range(steps):
        model(torch.full((4, 5), 0.1 * (step + 1))).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "extra_state": {"step": steps}}


def _save_lora(rank: int, world_size: int, base: str, path: str, layout: str) -> None:
    state = _lora_run(1, layout, 0)
    bcp.save(base, {"model": state["model"]}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    state = _lora_run(1, layout, 2)
    for _ in range(2):  # the second save uses the cached plan
        bcp.save(path, state, options=bcp.SaveOptions(trainable_only=True, deadline_s=time_limit(30)))
    bcp.save(f"{path}-full", state, options=bcp.SaveOptions(deadline_s=time_limit(30)))


def _resume_lora(rank: int, world_size: int, base: str, path: str, layout: str, resumed: str) -> list[str]:
    state = _lora_run(2, layout, 1)
    bcp.load(base, {"model": state["model"]}, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    report = bcp.load(path, state, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    assert not report.missing
    assert not report.unexpected
    bcp.save(resumed, state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return report.left_out


@pytest.mark.parametrize(
    ("layout", "saved_by", "resumed_by"), [("fsdp2", 2, 3), ("fsdp2", 3, 1), ("plain", 2, 1), ("fsdp1", 2, 3)]
)
def test_an_adapter_resumes_on_another_world_size(
    pool: RankPool, tmp_path: Path, layout: str, saved_by: int, resumed_by: int
) -> None:
    base, path, resumed = str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "resumed")
    pool.run(_save_lora, base, path, layout, world_size=saved_by)
    frozen = [f"model.{layer}.base.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    stored = bcp.open(path)
    assert not [name for name in stored if ".base." in name]
    assert {"model.0.a", "model.0.calls", "optimizer.state.2.b.exp_avg"} <= set(stored)
    assert {name for name in stored.left_out if name.startswith("model.")} == set(frozen)
    after = layout if resumed_by > 1 else "plain"
    for left_out in pool.run(_resume_lora, base, path, after, resumed, world_size=resumed_by):
        assert {name for name in left_out if name.startswith("model.")} == set(frozen)
    # Everything is as in a full checkpoint of the run, bit for bit.
    full, got = bcp.open(f"{path}-full"), bcp.open(resumed)
    assert set(full) == set(got)
    assert not [name for name in full if not torch.equal(full[name].load(), got[name].load())]
    for section in full.sections:
        assert full.section_values(section) == got.section_values(section)


def test_a_load_of_an_adapter_does_not_hide_what_is_left_out(tmp_path: Path) -> None:
    state = _lora_run(1, "plain", 1)
    bcp.save(tmp_path, state, options=bcp.SaveOptions(trainable_only=True))
    other = _lora_run(2, "plain", 1)
    before = other["model"][0].base.weight.clone()
    report = bcp.load(tmp_path, other)
    assert "model.0.base.weight" in report.left_out
    assert f"{len(report.left_out)} left out" in str(report)
    assert torch.equal(other["model"][0].base.weight, before)
    with pytest.raises(MismatchError, match="the save was asked to leave it out") as caught:
        bcp.load(tmp_path, other, strict="exact")
    assert "model.0.base.weight" in faults_of(caught, "missing")
    # A name that the saved state did not have is missing as always.
    model = nn.Sequential(*other["model"], nn.Linear(2, 2))
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, {"model": model})
    assert faults_of(caught, "missing") == ["model.3.bias", "model.3.weight"]


def test_left_out_names_follow_a_rename(tmp_path: Path) -> None:
    state = _lora_run(1, "plain", 1)
    bcp.save(tmp_path, state, exclude=["model.0.base.*", "optimizer.state.0.a.exp_avg"])
    model = nn.Sequential()
    for name, layer in zip(("first", "middle", "last"), state["model"]):
        model.add_module(name, copy.deepcopy(layer))
    target = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    model(torch.ones(1, 5)).sum().backward()
    target["optimizer"].step()

    def rename(name: str) -> str:
        return name.replace("model.0.", "model.first.").replace("model.2.", "model.last.")

    report = bcp.load(tmp_path, target, rename=rename)
    left_out = ["model.first.base.bias", "model.first.base.weight", "optimizer.state.first.a.exp_avg"]
    assert sorted(report.left_out) == left_out


def test_frozen_tied_tensors_and_state_of_lbfgs(tmp_path: Path) -> None:
    """A tied parameter is stored if one of its names gets a gradient; LBFGS has one state for all parameters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model.requires_grad_(False)
    model[1].weight = nn.Parameter(model[0].weight.detach())  # the same memory
    model[2].bias.requires_grad_(True)
    params = [parameter for name, parameter in model.named_parameters() if name != "1.weight"]
    optimizer = torch.optim.LBFGS(params, max_iter=2)

    def closure() -> float:
        loss = model(torch.ones(1, 3)).pow(2).sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, options=bcp.SaveOptions(trainable_only=True))
    found = bcp.open(tmp_path)
    assert [name for name in found if name.startswith("model.")] == ["model.0.weight", "model.2.bias", "model.1.weight"]
    other = torch.optim.LBFGS(params, max_iter=2)
    bcp.load(tmp_path, {"model": model, "optimizer": other})
    assert other.state_dict()["state"][0]["func_evals"] == optimizer.state_dict()["state"][0]["func_evals"]


# -- patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"exclude": ["optimizer"]}, {"optimizer"}),
        ({"include": ["model", "extra_state.*"]}, {"optimizer"}),
        ({"include": ["model.0.weight", "optimizer", "extra_state"]}, {"model.0.bias", "model.1", "model.count"}),
        ({"exclude": ["extra_state.table", "extra_state.best"]}, {"extra_state.table", "extra_state.best"}),
        ({"exclude": ["*.weight", "*.weight.*"]}, {"model.0.weight", "model.1.weight", "optimizer.0", "optimizer.2"}),
    ],
)
def test_a_load_leaves_unchanged_what_was_left_out(tmp_path: Path, options: dict[str, Any], left_out: set[str]) -> None:
    saved, state = training(1.0), training(9.0, steps=2)
    bcp.save(tmp_path, saved, **saving(**options))
    requested, before = memory(saved), memory(state)
    report = bcp.load(tmp_path, state)
    after = memory(state)
    for name in after:
        is_left_out = any(name == part or name.startswith(f"{part}.") for part in left_out)
        if name != "optimizer.groups":  # has the options of weights and biases
            expected = before if is_left_out else requested
            assert not differing({name: after[name]}, {name: expected[name]}), name
    assert report.left_out
    assert set(report.left_out) <= set(bcp.open(tmp_path).left_out)
    assert not report.missing


def test_excluded_objects_need_no_stored_form(tmp_path: Path) -> None:
    state = {"extra_state": {"step": 1, "client": object(), "items": [torch.ones(2), object()]}}
    with pytest.raises(BytecheckpointError, match="not a plain value"):
        bcp.save(tmp_path, state)
    bcp.save(tmp_path, state, exclude=["extra_state.client", "extra_state.items.*"])
    assert bcp.open(tmp_path).section_values("extra_state")["step",] == 1
    empty: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_state": empty})
    assert empty == {"step": 1}
    assert bcp.open(tmp_path).left_out == ["extra_state.client", "extra_state.items.0", "extra_state.items.1"]


def test_names_of_a_tied_tensor_are_selected_one_by_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    for number, (exclude, stored) in enumerate(
        [
            (["model.embed.*"], ["model.head.weight"]),
            (["model.head.*"], ["model.embed.weight"]),
            (["model.x*"], []),
        ]
    ):
        path = tmp_path / str(number)
        if not stored:
            with pytest.raises(UsageError, match="nearest"):
                bcp.save(path, {"model": model}, exclude=exclude)
            continue
        bcp.save(path, {"model": model}, exclude=exclude)
        assert list(bcp.open(path)) == stored
        assert torch.equal(bcp.open(path)[stored[0]].load(), model["embed"].weight)
        other = copy.deepcopy(model)
        nn.init.zeros_(other["embed"].weight)
        report = bcp.load(path, {"model": other})
        assert torch.equal(other["head"].weight, model["head"].weight)
        assert report.loaded == stored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["extra_state.stepp"]}, r"exclude: 'extra_state.stepp' \(nearest: 'extra_state.step'"),
        ({"include": ["0.weight"]}, "'model.0.weight'"),
        ({"include": ["model.0.bias"], "exclude": ["model"]}, "exclude, which leaves nothing: 'model'"),
        ({"include": []}, "include is empty"),
        ({"exclude": "model"}, "lists of patterns"),
        ({"trainable_only": 1}, "trainable_only must be"),
    ],
)
def test_arguments_that_select_nothing(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    bcp.save(tmp_path / "earlier", training(1.0))  # has cached a plan for this state
    with pytest.raises(UsageError, match=message):
        bcp.save(tmp_path / "path", training(1.0), **saving(**options))
    assert not (tmp_path / "path").exists()


def test_a_model_without_gradients_is_not_an_empty_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="no module of the state has a parameter that requires a gradient"):
        bcp.save(tmp_path, {"model": model}, options=bcp.SaveOptions(trainable_only=True))


def test_a_model_that_lacks_tensors_is_no_model_directory(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {"model": model, "extra_state": {"step": 1}}
    for options, is_model in (
        ({"exclude": ["model.0.*"]}, False),
        ({"trainable_only": True}, False),
        ({"exclude": ["extra_state"]}, True),
    ):
        bcp.save(tmp_path, state, **saving(layout="whole", **options))
        assert (bcp.open(tmp_path).model_directory is not None) == is_model


# -- ranks -------------------------------------------------------------------------------------------------------------


def _save_stage(rank: int, world_size: int, path: str, by_rank: list[dict[str, Any]]) -> Any:
    stage = {"model": {f"layer{rank}": torch.full((3,), float(rank))}, "extra_state": {"step": 1, "own": rank}}
    try:
        bcp.save(path, stage, **saving(deadline_s=time_limit(30), **by_rank[rank]))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    return bcp.open(path).left_out


def test_ranks_select_the_same(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "path")
    same = [{"exclude": ["model.layer1", "extra_state.own"]}] * 2
    for _ in range(2):
        results = pool.run(_save_stage, path, same, world_size=2)
        assert results == [["extra_state.own", "model.layer1"]] * 2
    assert list(bcp.open(path)) == ["model.layer0"]
    # The same state, with the plans of the earlier saves.
    for results in (
        pool.run(_save_stage, path, [{"exclude": ["model.layer1"]}, {"exclude": ["model.layer0"]}], world_size=2),
        pool.run(_save_stage, path, [{"trainable_only": True}, {}], world_size=2),
    ):
        assert all("the ranks do not agree" in message for _, message in results)
    results = pool.run(_save_stage, path, [{"exclude": ["model.layer1", "model.layer2"]}] * 2, world_size=2)
    assert all("exclude: 'model.layer2'" in message and "layer1" not in message.split("(")[0] for _, message in results)
    assert list(bcp.open(path)) == ["model.layer0"], "a failed save has changed the checkpoint"
