"""Select the parts of a checkpoint to load, and fill memory in place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatches import faults_of
from small_training import differing, memory, plain_model, training
from sorted_arguments import loading

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, UsageError

# -- include and exclude -----------------------------------------------------------------------------------------------


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
        requested = stored if name.partition(".")[0] in taken and name not in exclude else before
        assert not differing({name: after[name]}, {name: requested[name]}), name
    assert {name.partition(".")[0] for name in report.loaded} == taken
    assert not report.missing
    assert not report.unexpected


def test_excluded_bytes_are_not_read(saved: Path) -> None:
    everything = bcp.load(saved, training(9.0))
    assert everything.bytes_requested == bcp.open(saved).manifest.nbytes
    nothing = bcp.load(saved, training(9.0), include=["extra_state.step"])
    assert (nothing.bytes_read, nothing.bytes_requested) == (0, 0)
    assert nothing.loaded == ["extra_state.step"]
    one = bcp.load(saved, training(9.0), include=["model.0.bias"])
    assert one.bytes_requested == 7 * 4
    assert one.bytes_read < 64 + 64 + 5000, "more than a file header and the chunks around it"


def test_files_of_excluded_sections_are_not_opened(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    for file in copy.glob("attempt-*/optimizer-*"):
        file.unlink()
    for options in ({"exclude": ["optimizer.*"]}, {"include": ["model.*", "extra_state.*"]}):
        state = training(9.0)
        bcp.load(copy, state, **loading(**options))
        assert torch.equal(state["model"][0].weight, training(1.0)["model"][0].weight)
    with pytest.raises(bcp.errors.CorruptionError, match="missing"):
        bcp.load(copy, training(9.0))


def test_patterns_across_model_and_optimizer(saved: Path) -> None:
    """Exclude one parameter in both sections."""
    state = training(9.0, steps=2)
    before, stored = memory(state), memory(training(1.0))
    bcp.load(saved, state, exclude=["model.0.weight", "optimizer.state.0.weight.*"])
    after = memory(state)
    for name in after:
        excluded = name == "model.0.weight" or name.startswith("optimizer.0.")
        requested = before if excluded else stored
        assert not differing({name: after[name]}, {name: requested[name]}), name


def test_hyper_parameters_can_be_excluded(saved: Path) -> None:
    state = training(9.0)
    state["optimizer"].param_groups[0]["lr"] = 0.125
    bcp.load(saved, state, exclude=["optimizer.param_groups.*"])
    assert state["optimizer"].param_groups[0]["lr"] == 0.125
    stored, loaded = memory(training(1.0)), memory(state)
    del stored["optimizer.groups"], loaded["optimizer.groups"]
    assert not differing(stored, loaded)


def test_a_pattern_that_is_not_a_list_is_refused(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"lists of patterns, not 'model.\*'"):
        bcp.load(saved, training(9.0), include="model.*")


@pytest.mark.parametrize(
    ("options", "fault", "hint"),
    [
        ({"include": ["model.0.wieght"]}, ("pattern", "model.0.wieght", "include"), "'model.0.weight'"),
        ({"include": ["module.*"]}, ("pattern", "module.*", "include"), "'model."),
        ({"include": ["model.*", "0.weight"]}, ("pattern", "0.weight", "include"), "'model.0.weight'"),
        ({"include": ["*", "ema"]}, ("pattern", "ema", "include"), "nearest: "),
        ({"exclude": ["*.exp_avg_squared"]}, ("pattern", "*.exp_avg_squared", "exclude"), ".exp_avg_sq'"),
        ({"exclude": ["extra_state.epoch"]}, ("pattern", "extra_state.epoch", "exclude"), "'extra_state."),
        ({"include": ["model.0.bias"], "exclude": ["model.*"]}, ("pattern", "model.*"), "leaves nothing"),
        ({"rename": {"model.0.wieght": "model.0.weight"}}, ("rename", "model.0.wieght"), "'model.0.weight'"),
        ({"rename": {"extra_state.epoch": "extra_state.step"}}, ("rename", "extra_state.epoch"), "'extra_state.step'"),
        ({"rename": {"nowhere.x": "nowhere.y"}}, ("rename", "nowhere.x"), "nearest: "),
        ({"rename": {"optimizer.state.0.bias.step": "optimizer.x"}}, ("rename", "optimizer.state.0.bias.step"), ""),
    ],
)
def test_patterns_and_renames_that_match_nothing(
    saved: Path, options: dict[str, Any], fault: tuple[str, ...], hint: str
) -> None:
    state = training(9.0)
    before = memory(state)
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state, strict=False, **loading(**options))
    assert fault in [found[: len(fault)] for found in caught.value.faults]
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith(f"    {fault[1]}")]
    assert hint in line
    assert not differing(before, memory(state))


def test_patterns_may_match_what_only_one_side_has(saved: Path) -> None:
    """Names that are only stored, only in the state, or in a section that no pattern includes."""
    state = training(9.0)
    state["extra_state"]["new"] = "local"
    del state["extra_state"]["name"]
    bcp.load(saved, state, exclude=["extra_state.new", "extra_state.name"])
    bcp.load(saved, training(9.0), include=["model"], exclude=["extra_state.name"])
    bcp.load(saved, {"ema": plain_model(9.0), "model": plain_model(2.0)}, exclude=["ema.*"])
    # A mapping may be longer than what this load needs.
    bcp.load(saved, {"model": plain_model(9.0)}, rename={"extra_state.step": "extra_state.epoch"})


def test_an_empty_include_is_refused(saved: Path) -> None:
    with pytest.raises(UsageError, match="include is empty"):
        bcp.load(saved, training(9.0), include=[])


def test_excluded_values_and_names_that_only_one_side_has(saved: Path) -> None:
    """Excluded names are not compared either."""
    state = training(9.0)
    del state["extra_state"]["name"]
    state["extra_state"]["new"] = "local"
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert faults_of(caught, "missing") == ["extra_state.new"]
    assert faults_of(caught, "unexpected") == ["extra_state.name"]
    bcp.load(saved, state, exclude=["extra_state.n*"])
    assert state["extra_state"]["new"] == "local"
    assert state["extra_state"]["step"] == 1


# -- sections ----------------------------------------------------------------------------------------------------------


def test_sections_outside_the_state_are_not_read(saved: Path) -> None:
    model = plain_model(9.0)
    report = bcp.load(saved, {"model": model})
    assert sorted(report.loaded) == sorted(f"model.{name}" for name in model.state_dict())
    assert torch.equal(model[0].weight, training(1.0)["model"][0].weight)
    assert report.bytes_requested == sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_part_of_a_section(saved: Path) -> None:
    """Half of a model, and a dict with one of the keys."""
    state: dict[str, Any] = {"model": {"0.weight": torch.zeros(7, 5)}, "extra_state": {"step": 0}}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert "model.2.weight" not in str(caught.value)
    assert faults_of(caught, "unexpected") == sorted(
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
    assert faults_of(caught, "missing") == ["ema"]
    assert torch.equal(state["model"][0].weight, plain_model(9.0)[0].weight)
    report = bcp.load(saved, state, strict={"ema": False})
    assert report.missing == ["ema"]
    assert torch.equal(state["ema"][0].weight, plain_model(9.0)[0].weight)
    report = bcp.load(saved, state, exclude=["ema.*"])
    assert report.missing == []


# -- in place ----------------------------------------------------------------------------------------------------------


def test_tensors_keep_their_identity(saved: Path) -> None:
    state = training(9.0)
    table, extra = state["extra_state"]["table"], state["extra_state"]
    tensors = [*state["model"].state_dict(keep_vars=True).values(), table]
    tensors += [value for entry in state["optimizer"].state.values() for value in entry.values()]
    places = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
    bcp.load(saved, state)
    assert [(id(tensor), tensor.data_ptr()) for tensor in tensors] == places
    assert state["extra_state"] is extra
    assert extra["table"] is table
    assert not differing(memory(state), memory(training(1.0)))
    # The tree is changed in place; the values in it are replaced.
    assert extra["best"] == [1.0, None, (1, "two")]


def test_an_empty_dict_gets_everything(saved: Path) -> None:
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
