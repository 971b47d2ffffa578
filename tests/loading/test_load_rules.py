"""What a load takes, leaves, casts and refuses: patterns, renaming, strictness, casts, reports, ranks, optimizers."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import differing, memory, plain_model, stepped, training
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, StateError
from bytecheckpoint.testing.ranks import RankPool
from bytecheckpoint.trace import LOAD_STEPS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``training(1.0)``."""
    path = tmp_path_factory.mktemp("rules") / "checkpoint"
    bcp.save(path, training(1.0), step=7, metadata={"by": "test"}, chunk_size=64)
    return path


def _faults(caught: pytest.ExceptionInfo[MismatchError], kind: str) -> list[str]:
    return sorted(name for found, name, _ in caught.value.faults if found == kind)


# -- include and exclude -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        (["model.*"], [], {"model"}),
        (["model"], [], {"model"}),
        (["*"], ["optimizer", "extra_state"], {"model"}),
        (["*"], ["optimizer.*"], {"model", "extra_state"}),
        (["*"], ["optimizer.*", "extra_state.*"], {"model"}),
        (["optimizer.*"], [], {"optimizer"}),
        (["extra_state.*"], ["extra_state.table"], {"extra_state"}),
    ],
)
def test_patterns_on_sections(saved: Path, include: list[str], exclude: list[str], taken: set[str]) -> None:
    state = training(9.0, steps=2)
    before, stored = memory(state), memory(training(1.0))
    report = bcp.load(saved, state, include=include, exclude=exclude)
    after = memory(state)
    for name in after:
        wanted = stored if name.partition(".")[0] in taken and name not in exclude else before
        assert not differing({name: after[name]}, {name: wanted[name]}), name
    assert {name.partition(".")[0] for name in report.loaded} == taken
    assert not report.missing
    assert not report.unexpected


def test_no_byte_of_what_is_excluded_is_read(saved: Path) -> None:
    everything = bcp.load(saved, training(9.0))
    assert everything.bytes_wanted == bcp.open(saved).manifest.nbytes
    nothing = bcp.load(saved, training(9.0), include=["extra_state.step"])
    assert (nothing.bytes_read, nothing.bytes_wanted) == (0, 0)
    assert nothing.loaded == ["extra_state.step"]
    one = bcp.load(saved, training(9.0), include=["model.0.bias"])
    assert one.bytes_wanted == 7 * 4
    assert one.bytes_read < 64 + 64 + 5000, "more than a file header and the chunks around it"


def test_files_of_what_is_excluded_are_not_even_opened(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    for file in copy.glob("attempt-*/optimizer-*"):
        file.unlink()
    for options in ({"exclude": ["optimizer.*"]}, {"include": ["model.*", "extra_state.*"]}):
        state = training(9.0)
        bcp.load(copy, state, **options)
        assert torch.equal(state["model"][0].weight, training(1.0)["model"][0].weight)
    with pytest.raises(bcp.errors.CorruptionError, match="missing"):
        bcp.load(copy, training(9.0))


def test_patterns_across_model_and_optimizer(saved: Path) -> None:
    """One parameter is left alone in both."""
    state = training(9.0, steps=2)
    before, stored = memory(state), memory(training(1.0))
    bcp.load(saved, state, exclude=["model.0.weight", "optimizer.state.0.weight.*"])
    after = memory(state)
    for name in after:
        excluded = name == "model.0.weight" or name.startswith("optimizer.0.")
        wanted = before if excluded else stored
        assert not differing({name: after[name]}, {name: wanted[name]}), name


def test_hyper_parameters_can_be_left_alone(saved: Path) -> None:
    state = training(9.0)
    state["optimizer"].param_groups[0]["lr"] = 0.125
    bcp.load(saved, state, exclude=["optimizer.param_groups.*"])
    assert state["optimizer"].param_groups[0]["lr"] == 0.125
    stored, loaded = memory(training(1.0)), memory(state)
    del stored["optimizer.groups"], loaded["optimizer.groups"]
    assert not differing(stored, loaded)


def test_patterns_that_are_no_lists(saved: Path) -> None:
    with pytest.raises(StateError, match=r"lists of patterns, not 'model.\*'"):
        bcp.load(saved, training(9.0), include="model.*")


def test_excluded_values_and_names_that_only_one_side_has(saved: Path) -> None:
    """Exclusion takes names out of the comparison too."""
    state = training(9.0)
    del state["extra_state"]["name"]
    state["extra_state"]["new"] = "mine"
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert _faults(caught, "missing") == ["extra_state.new"]
    assert _faults(caught, "unexpected") == ["extra_state.name"]
    bcp.load(saved, state, exclude=["extra_state.n*"])
    assert state["extra_state"]["new"] == "mine"
    assert state["extra_state"]["step"] == 1


# -- sections ----------------------------------------------------------------------------------------------------


def test_sections_not_asked_for_stay_unread(saved: Path) -> None:
    model = plain_model(9.0)
    report = bcp.load(saved, {"model": model})
    assert sorted(report.loaded) == sorted(f"model.{name}" for name in model.state_dict())
    assert torch.equal(model[0].weight, plain_model(1.0)[0].weight) is False  # one step was taken before saving
    assert torch.equal(model[0].weight, training(1.0)["model"][0].weight)
    assert report.bytes_wanted == sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_part_of_a_section(saved: Path) -> None:
    """Half of a model, and a dict with one of the keys."""
    state: dict[str, Any] = {"model": {"0.weight": torch.zeros(7, 5)}, "extra_state": {"step": 0}}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert "model.2.weight" not in str(caught.value)
    assert _faults(caught, "unexpected") == sorted(
        [
            *("model.0.bias", "model.1.weight", "model.1.bias", "model.count"),
            *("extra_state.best", "extra_state.name", "extra_state.table"),
        ]
    )
    assert state["extra_state"] == {"step": 0}
    report = bcp.load(saved, state, strict=False)
    assert torch.equal(state["model"]["0.weight"], training(1.0)["model"][0].weight)
    assert state["extra_state"] == {"step": 1}
    assert "model.1.bias" in report.unexpected
    assert "extra_state.name" in report.unexpected


def test_a_section_the_checkpoint_does_not_have(saved: Path) -> None:
    state = {"model": plain_model(9.0), "ema": plain_model(9.0)}
    with pytest.raises(MismatchError, match="ema: no such section; the checkpoint has") as caught:
        bcp.load(saved, state)
    assert _faults(caught, "missing") == ["ema"]
    assert torch.equal(state["model"][0].weight, plain_model(9.0)[0].weight)
    report = bcp.load(saved, state, strict={"ema": False})
    assert report.missing == ["ema"]
    assert torch.equal(state["ema"][0].weight, plain_model(9.0)[0].weight)
    report = bcp.load(saved, state, exclude=["ema.*"])
    assert report.missing == []


# -- in place ----------------------------------------------------------------------------------------------------


def test_tensors_keep_their_identity(saved: Path) -> None:
    state = training(9.0)
    table, best, extra = state["extra_state"]["table"], state["extra_state"]["best"], state["extra_state"]
    tensors = [*state["model"].state_dict(keep_vars=True).values(), table]
    tensors += [value for entry in state["optimizer"].state.values() for value in entry.values()]
    places = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
    state["extra_state"]["best"] = best
    bcp.load(saved, state)
    assert [(id(tensor), tensor.data_ptr()) for tensor in tensors] == places
    assert state["extra_state"] is extra
    assert extra["table"] is table
    assert not differing(memory(state), memory(training(1.0)))
    # A tree is changed, not replaced; what stands in it is.
    assert extra["best"] == [1.0, None, (1, "two")]


def test_an_empty_dict_takes_everything(saved: Path) -> None:
    extra: dict[str, Any] = {}
    report = bcp.load(saved, {"extra_state": extra})
    assert not differing(
        {f"extra_state.{k}": v for k, v in extra.items()},
        {k: v for k, v in memory(training(1.0)).items() if k.startswith("extra_state")},
    )
    assert sorted(report.loaded) == sorted(f"extra_state.{name}" for name in extra)
    model: dict[str, Any] = {}
    bcp.load(saved, {"model": model})
    assert torch.equal(model["0.weight"], training(1.0)["model"][0].weight)


# -- renaming ----------------------------------------------------------------------------------------------------


class _Renamed(nn.Module):
    """The same network under other names."""

    def __init__(self) -> None:
        super().__init__()
        old = plain_model(9.0)
        self.first, self.second = old[0], old[1]
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


_MAP = {
    "model.0.weight": "model.first.weight",
    "model.0.bias": "model.first.bias",
    "model.1.weight": "model.second.weight",
    "model.1.bias": "model.second.bias",
}


def _by_function(name: str) -> str:
    return re.sub(r"^model\.1\.", "model.second.", re.sub(r"^model\.0\.", "model.first.", name))


@pytest.mark.parametrize("rename", [_MAP, _by_function], ids=["map", "function"])
def test_renaming_takes_the_optimizer_along(saved: Path, rename: Any) -> None:
    model = _Renamed()
    optimizer = stepped(model, 2, lr=9.0)
    report = bcp.load(saved, {"model": model, "optimizer": optimizer}, rename=rename)
    wanted = training(1.0)
    assert torch.equal(model.second.weight, wanted["model"][1].weight)
    loaded, expected = optimizer.state_dict(), wanted["optimizer"].state_dict()
    assert loaded["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(loaded["state"][index][key], value), (index, key)
    assert "optimizer.state.second.weight.exp_avg" in report.loaded
    assert not report.lazy


def test_without_renaming_one_error_proposes_names(saved: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, {"model": {"0.wieght": torch.zeros(7, 5), "count": torch.zeros((), dtype=torch.int64)}})
    assert "model.0.wieght (did you mean 'model.0.weight'?)" in str(caught.value)
    assert "rename= maps other names" in str(caught.value)


def test_renaming_and_excluding_use_the_names_of_the_state(saved: Path) -> None:
    """What the state does not have after renaming can be excluded by its new name, in the optimizer too."""
    model = nn.Module()
    model.register_module("first", plain_model(9.0)[0])
    optimizer = stepped(model)
    options: dict[str, Any] = {"rename": _by_function}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, {"model": model, "optimizer": optimizer}, **options)
    assert _faults(caught, "unexpected") == ["model.count", "model.second.bias", "model.second.weight"]
    exclude = ["model.count", "*.second.*"]
    bcp.load(saved, {"model": model, "optimizer": optimizer}, exclude=exclude, strict="exact", **options)
    assert torch.equal(model.first.weight, training(1.0)["model"][0].weight)


def test_renaming_in_a_section_of_another_name(tmp_path: Path) -> None:
    """An optimizer's state follows the parameter wherever that is stored."""
    actor, critic = plain_model(1.0), plain_model(2.0)
    state = {"actor": actor, "actor_optimizer": stepped(actor), "critic": critic}
    bcp.save(tmp_path, state)
    other = _Renamed()
    optimizer = stepped(other, 2)
    rename = {name.replace("model.", "actor."): new.replace("model.", "actor.") for name, new in _MAP.items()}
    bcp.load(tmp_path, {"actor": other, "actor_optimizer": optimizer}, rename=rename)
    stored = state["actor_optimizer"].state_dict()["state"]
    assert all(torch.equal(optimizer.state_dict()["state"][i]["exp_avg"], stored[i]["exp_avg"]) for i in stored)
    # One optimizer over both modules knows its parameters by section and name.
    both = tmp_path / "both"
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
    for parameter in (*actor.parameters(), *critic.parameters()):
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    bcp.save(both, {"actor": actor, "critic": critic, "optimizer": optimizer})
    target = torch.optim.SGD([*critic.parameters(), *other.parameters()], lr=0.5, momentum=0.9)
    bcp.load(both, {"actor": other, "critic": critic, "optimizer": target}, rename=rename)
    assert torch.equal(
        target.state[other.first.weight]["momentum_buffer"], optimizer.state[actor[0].weight]["momentum_buffer"]
    )


def test_two_names_renamed_to_one(saved: Path) -> None:
    for rename in ({"model.0.bias": "model.1.bias"}, {"extra_state.step": "extra_state.name"}):
        state = training(9.0)
        before = memory(state)
        with pytest.raises(StateError, match=r"rename takes two stored names, \S+ and \S+, to"):
            bcp.load(saved, state, rename=rename, strict=False)
        assert not differing(before, memory(state))
    with pytest.raises(StateError, match="rename returned None"):
        bcp.load(saved, training(9.0), rename=lambda name: None)  # type: ignore[arg-type,return-value]


def test_values_are_renamed_too(saved: Path) -> None:
    extra = {"global_step": 0}
    bcp.load(saved, {"extra_state": extra}, rename={"extra_state.step": "extra_state.global_step"}, strict=False)
    assert extra == {"global_step": 1}


# -- strictness --------------------------------------------------------------------------------------------------


def test_one_error_lists_everything(saved: Path) -> None:
    state: dict[str, Any] = training(9.0)
    before = memory(state)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 4).double(), nn.Linear(1, 1))
    model.register_buffer("count", torch.zeros(()))
    state = {"model": model, "extra_state": {"step": 0, "steps": 1, "table": torch.zeros(6, dtype=torch.int32)}}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert _faults(caught, "missing") == ["extra_state.steps", "model.2.bias", "model.2.weight"]
    assert _faults(caught, "unexpected") == ["extra_state.best", "extra_state.name", "model.0.bias"]
    assert _faults(caught, "shape") == ["model.1.bias", "model.1.weight"]
    assert _faults(caught, "dtype") == ["extra_state.table", "model.count"]
    said = str(caught.value)
    assert "(10 fault(s)); nothing was changed" in said
    assert "model.1.weight: stored [3, 7], wanted [4, 7]" in said
    assert "extra_state.table: stored as float32, wanted as int32: no meaningful cast exists" in said
    assert "extra_state.steps (did you mean 'extra_state.step'?)" in said
    assert str(saved) in said
    assert before


def test_strictness_by_section(saved: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            "model": {"more": torch.zeros(1), "count": torch.zeros((), dtype=torch.int64)},
            "extra_state": {"new": 1},
        }

    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state(), strict={"model": False})
    assert {name.partition(".")[0] for _, name, _ in caught.value.faults} == {"extra_state"}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state(), strict={"extra_state": "lenient", "model": "strict"})
    assert {name.partition(".")[0] for _, name, _ in caught.value.faults} == {"model"}
    report = bcp.load(saved, state(), strict={"extra_state": "lenient", "model": False})
    assert report.missing == ["model.more", "extra_state.new"] or report.missing == ["extra_state.new", "model.more"]
    assert "extra_state.table" in report.unexpected
    assert report.loaded == ["model.count"]


def test_shapes_and_dtypes_are_never_tolerated(saved: Path) -> None:
    for tensor in (torch.zeros(7, 6), torch.zeros(7, 5, dtype=torch.int64)):
        with pytest.raises(MismatchError):
            bcp.load(saved, {"model": {"0.weight": tensor}}, strict=False, cast="any")


@pytest.mark.parametrize("strict", ["sometimes", {"model": "sometimes"}, {"nowhere": True}, 3])
def test_strictness_that_means_nothing(saved: Path, strict: Any) -> None:
    with pytest.raises(StateError, match=r"strict (must be|names sections)"):
        bcp.load(saved, training(9.0), strict=strict)


def test_exact_allows_no_lazy_state(tmp_path: Path) -> None:
    model = plain_model()
    bcp.save(tmp_path, {"model": model, "optimizer": stepped(model, 0)})
    loaded = plain_model()
    report = bcp.load(tmp_path, {"model": loaded, "optimizer": stepped(loaded, 0)}, strict="exact")
    assert not report.lazy
    bcp.save(tmp_path, {"model": model, "optimizer": stepped(model, 1)})
    half = nn.ModuleDict({"0": model[0]})
    half.register_buffer("count", torch.zeros((), dtype=torch.int64))
    optimizer = stepped(half)
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, {"model": half, "optimizer": optimizer}, strict={"model": False, "optimizer": "exact"})
    assert all("optimizer." in name and ".1." in name for name in _faults(caught, "unexpected"))
    bcp.load(tmp_path, {"model": half, "optimizer": optimizer}, strict={"model": False})


# -- casts -------------------------------------------------------------------------------------------------------


def _cast(tmp_path: Path, stored: torch.Tensor, wanted: torch.dtype, cast: str) -> torch.Tensor:
    path = tmp_path / f"{stored.dtype}".replace(".", "-")
    bcp.save(path, {"model": {"w": stored}})
    target = torch.zeros(stored.shape, dtype=wanted)
    report = bcp.load(path, {"model": {"w": target}}, cast=cast)  # type: ignore[arg-type]
    if stored.dtype != wanted:
        names = tuple(str(dtype).removeprefix("torch.") for dtype in (stored.dtype, wanted))
        assert report.cast == {"model.w": names}
        assert "1 cast" in str(report)
    return target


def test_widening_is_fine_and_reported(tmp_path: Path) -> None:
    stored = torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16)
    assert torch.equal(_cast(tmp_path, stored, torch.float32, "widen"), stored.float())
    assert torch.equal(_cast(tmp_path, torch.tensor([True, False]), torch.int32, "widen"), torch.tensor([1, 0]).int())
    with pytest.raises(MismatchError, match="stored as bfloat16, wanted as float32: cast='widen' allows it"):
        _cast(tmp_path, stored, torch.float32, "exact")


def test_rounding_only_when_asked(tmp_path: Path) -> None:
    stored = torch.tensor([1.1, 3.3])
    for wanted in (torch.bfloat16, torch.float16):
        with pytest.raises(MismatchError, match=r"stored as float32, wanted as \w+: cast='any' allows it"):
            _cast(tmp_path, stored, wanted, "widen")
        assert torch.equal(_cast(tmp_path, stored, wanted, "any"), stored.to(wanted))
    wide = torch.tensor([2**40], dtype=torch.int64)
    with pytest.raises(MismatchError, match="cast='any' allows it"):
        _cast(tmp_path, wide, torch.float32, "widen")


def test_fractions_never_become_whole_numbers(tmp_path: Path) -> None:
    for wanted in (torch.int32, torch.uint8, torch.bool):
        with pytest.raises(MismatchError, match="no meaningful cast exists"):
            _cast(tmp_path, torch.tensor([1.0, 2.0]), wanted, "any")
    with pytest.raises(MismatchError, match="no meaningful cast exists"):
        _cast(tmp_path, torch.tensor([1.0 + 2j]), torch.float32, "any")
    with pytest.raises(StateError, match="cast must be"):
        bcp.load(tmp_path, {"model": {}}, cast="sometimes")  # type: ignore[arg-type]


def test_a_cast_of_a_model_and_its_optimizer(saved: Path) -> None:
    """fp32 master weights into a float64 run."""
    model = plain_model(9.0).double()
    optimizer = stepped(model, 1)
    report = bcp.load(saved, {"model": model, "optimizer": optimizer})
    assert torch.equal(model[0].weight, training(1.0)["model"][0].weight.double())
    assert report.cast["model.0.weight"] == ("float32", "float64")
    assert report.cast["optimizer.state.0.weight.exp_avg"] == ("float32", "float64")
    assert "model.count" not in report.cast


# -- reports -----------------------------------------------------------------------------------------------------


def test_the_report(saved: Path) -> None:
    state = training(9.0)
    report = bcp.load(str(saved), state)
    assert report.url == str(saved)
    assert report.step == 7
    assert report.metadata == {"by": "test"}
    assert report.saved_world_size == 1
    names = set(bcp.open(saved))
    assert names <= set(report.loaded)
    assert {"extra_state.step", "extra_state.name", "extra_state.best"} <= set(report.loaded)
    assert len(report.loaded) == len(set(report.loaded))
    assert [report.missing, report.unexpected, report.lazy, report.cast, report.notes] == [[], [], [], {}, []]
    assert report.bytes_wanted == bcp.open(saved).manifest.nbytes
    assert report.bytes_read >= report.bytes_wanted
    assert list(report.timings.seconds) == list(LOAD_STEPS)
    assert f"{len(report.loaded)} loaded" in str(report)
    assert f"{report.bytes_read} bytes read" in str(report)


# -- nothing changes when anything is wrong ----------------------------------------------------------------------


def test_nothing_is_changed_by_a_load_that_finds_a_fault(tmp_path: Path) -> None:
    saved = training(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(saved["optimizer"], 2)
    bcp.save(tmp_path, {**saved, "scheduler": scheduler})
    state = training(9.0, steps=3)
    theirs = torch.optim.lr_scheduler.StepLR(state["optimizer"], 5)
    before, schedule = memory(state), dict(theirs.state_dict())
    state["extra_state"]["another"] = 1
    before["extra_state.another"] = 1
    with pytest.raises(MismatchError, match=r"extra_state\.another"):
        bcp.load(tmp_path, {**state, "scheduler": theirs})
    assert not differing(before, memory(state))
    assert theirs.state_dict() == schedule
    del state["extra_state"]["another"]
    bcp.load(tmp_path, {**state, "scheduler": theirs})
    assert not differing(memory(state), memory(saved))
    assert theirs.state_dict() == scheduler.state_dict()


def test_a_meta_model_stays_one_when_a_fault_is_found(saved: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4))
    with pytest.raises(MismatchError):
        bcp.load(saved, {"model": model})
    assert all(parameter.is_meta for parameter in model.parameters())


# -- optimizers --------------------------------------------------------------------------------------------------


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: dict(entries) for parameter, entries in optimizer.state.items()}


def test_a_parameter_without_gradient_has_no_state_on_either_side(tmp_path: Path) -> None:
    """What was never created is neither an error nor invented, and what the target had of it goes."""

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
    mine = {key: value.clone() for key, value in target.state[other[0].weight].items()}
    report = bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert torch.equal(other[0].weight, model[0].weight)
    assert any("0.weight" in name for name in report.lazy)
    assert all(torch.equal(target.state[other[0].weight][key], value) for key, value in mine.items())
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
    # Merging groups that were stepped differently has no right answer.
    other, target = _grouped(9.0, [(weights + biases, 9.0)])
    before = _named_state(other, target)["0.bias"]["exp_avg"].clone()
    with pytest.raises(MismatchError, match=r"split the group as it was") as caught:
        bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert "lr = 0.25" in str(caught.value)
    assert torch.equal(_named_state(other, target)["0.bias"]["exp_avg"], before)
    bcp.load(tmp_path, {"model": other, "optimizer": target}, exclude=["optimizer.param_groups.*"])
    assert target.param_groups[0]["lr"] == 9.0
    # Groups of one kind merge.
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


def test_an_exhausted_scheduler_and_a_scaler_come_back(tmp_path: Path) -> None:
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


# -- ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _save_stages(rank: int, world_size: int, path: str) -> None:
    bcp.save(
        path, {"model": {name: torch.full((3,), float(i)) for i, name in enumerate("abcd")}, "extra_state": {"s": 1}}
    )


def _load_stages(rank: int, world_size: int, path: str, names: list[str]) -> tuple[Any, ...]:
    """Each rank asks for its own part of the model, as pipeline stages do."""
    mine = {name: torch.zeros(3) for name in names[rank::world_size]}
    try:
        report = bcp.load(path, {"model": mine, "extra_state": {"s": 0}}, deadline_s=30)
    except MismatchError as error:
        return str(error), sorted(error.faults)
    return {name: tensor[0].item() for name, tensor in mine.items()}, report.unexpected, report.bytes_wanted


def test_disjoint_targets_are_not_unexpected(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_stages, str(tmp_path), world_size=1)
    assert pool.run(_load_stages, str(tmp_path), list("abcd"), world_size=2) == [
        ({"a": 0.0, "c": 2.0}, [], 24),
        ({"b": 1.0, "d": 3.0}, [], 24),
    ]
    said = pool.run(_load_stages, str(tmp_path), list("abx"), world_size=2)
    assert said[0] == said[1], "the ranks raise different errors"
    assert [tuple(fault[:2]) for fault in said[0][1]] == [
        ("missing", "model.x"),
        ("unexpected", "model.c"),
        ("unexpected", "model.d"),
    ]


def _per_rank_state(rank: int, policy: str | None) -> dict[str, Any]:
    held: Any = {"number": rank, "buffer": torch.full((2,), float(rank))}
    return {"extra_state": {"own": bcp.PerRank(held, policy) if policy else held, "shared": 5}}


def _save_per_rank(rank: int, world_size: int, path: str, declared: bool) -> None:
    bcp.save(path, _per_rank_state(rank, "error" if declared else None), deadline_s=30)


def _load_per_rank(rank: int, world_size: int, path: str, policy: str | None, option: str) -> Any:
    state = _per_rank_state(-1, policy)
    try:
        report = bcp.load(path, state, per_rank=option, deadline_s=30)
    except MismatchError as error:
        return sorted({name for kind, name, _ in error.faults if kind == "per_rank"}), str(error)
    own = state["extra_state"]["own"]
    held = own.value if policy else own
    assert state["extra_state"]["shared"] == 5
    assert not report.missing
    assert not report.unexpected
    assert held["buffer"].tolist() == [held["number"]] * 2
    return held["number"]


@pytest.mark.parametrize("declared", [True, False], ids=["PerRank", "merely different"])
def test_values_of_single_ranks(pool: RankPool, tmp_path: Path, declared: bool) -> None:
    """``PerRank`` in the target says for itself; for values that merely differed the option of ``load`` does."""
    path = str(tmp_path)
    pool.run(_save_per_rank, path, declared, world_size=2)
    run = pool.run
    assert run(_load_per_rank, path, "error" if declared else None, "error", world_size=2) == [0, 1]
    for policy, by_rank in (("lowest", [0, 0, 0, 0]), ("modulo", [0, 1, 0, 1]), ("skip", [-1, -1, -1, -1])):
        ours, option = (policy, "error") if declared else (None, policy)
        for size in (1, 3, 4):
            assert run(_load_per_rank, path, ours, option, world_size=size) == by_rank[:size], (policy, size)
    for size in (1, 4):
        said = run(_load_per_rank, path, "error" if declared else None, "error", world_size=size)
        assert {"extra_state.own.buffer", "extra_state.own.number"} <= set(said[0][0])
        assert f"saved by 2 rank(s), loaded by {size}" in said[0][1]
        assert "per_rank='lowest', 'modulo' or 'skip'" in said[0][1]
        assert all(one == said[0] for one in said)


def _unwanted_per_rank(rank: int, world_size: int, path: str) -> list[str]:
    try:
        bcp.load(path, {"extra_state": {"shared": 0}}, deadline_s=30)
    except MismatchError as error:
        return sorted(name for _, name, _ in error.faults)
    return []


def test_values_of_single_ranks_that_nobody_takes_are_unexpected(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_per_rank, str(tmp_path), True, world_size=2)
    expected = ["extra_state.own.buffer", "extra_state.own.number"]
    assert pool.run(_unwanted_per_rank, str(tmp_path), world_size=2) == [expected, expected]


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _save_rng(rank: int, world_size: int, path: str) -> list[float]:
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    torch.manual_seed(100 + rank)
    bcp.save(path, {"rng": bcp.RNGState(), "extra_state": {"x": 1}}, deadline_s=30)
    return _draw()


def _load_rng(rank: int, world_size: int, path: str, on_resize: str) -> list[float] | str:
    random.seed(5)
    try:
        bcp.load(path, {"rng": bcp.RNGState(on_resize)}, deadline_s=30)  # type: ignore[arg-type]
    except bcp.errors.BytecheckpointError as error:
        return str(error)
    return _draw()


def test_random_generators(pool: RankPool, tmp_path: Path) -> None:
    """The same numbers on the same ranks; at another world size what the target asks for."""
    path = str(tmp_path)
    drawn = pool.run(_save_rng, path, world_size=2)
    assert drawn[0] != drawn[1]
    for policy in ("error", "reseed", "lowest"):
        assert pool.run(_load_rng, path, policy, world_size=2) == drawn
    assert pool.run(_load_rng, path, "lowest", world_size=3) == [drawn[0]] * 3
    fresh = pool.run(_load_rng, path, "reseed", world_size=3)
    assert fresh == pool.run(_load_rng, path, "reseed", world_size=3), "a second load draws other numbers"
    assert len({tuple(one) for one in [*fresh, *drawn]}) == 5, "two ranks draw the same numbers"
    refused = pool.run(_load_rng, path, "error", world_size=1)
    assert "saved by 2 rank(s), loaded by 1" in refused[0]
