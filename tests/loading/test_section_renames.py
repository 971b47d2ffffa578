"""Renames into another section, in every place that takes ``rename``, and renames that match nothing."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from mismatches import faults_of
from small_training import stepped
from torch import nn
from torch.optim import swa_utils

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.importing import import_checkpoint
from bytecheckpoint.errors import MismatchError, NameCollisionError, UsageError
from bytecheckpoint.inference.delivery import StoredWeights
from bytecheckpoint.inference.push.sources import source_of

_PREFIX = {"ema.module.": "model."}


class _Net(nn.Module):
    """A model with a buffer, and a value besides."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.note = "new"
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def _values(module: nn.Module) -> set[float]:
    return {
        float(one)
        for tensor in module.state_dict().values()
        if isinstance(tensor, torch.Tensor)
        for one in tensor.flatten()
    }


def _mapping(model: nn.Module) -> dict[str, str]:
    return {f"ema.module.{name}": f"model.{name}" for name, one in model.state_dict().items() if torch.is_tensor(one)}


_RENAMES: dict[str, Callable[[nn.Module], Any]] = {
    "names": _mapping,
    "prefix": lambda model: _PREFIX,
    "function": lambda model: lambda name: re.sub(r"^ema\.module\.", "model.", name),
}


@pytest.fixture
def averaged(tmp_path: Path) -> Path:
    """A checkpoint with a model of ones, its optimizer, and an average of twos."""
    model = _Net(1.0)
    optimizer = stepped(model)
    model.load_state_dict(_Net(1.0).state_dict())
    average = swa_utils.AveragedModel(_Net(2.0))
    average.module.note = "average"
    bcp.save(tmp_path / "averaged", {"model": model, "ema": average, "optimizer": optimizer, "extra": {"step": 3}})
    return tmp_path / "averaged"


@pytest.mark.parametrize("kind", _RENAMES)
@pytest.mark.parametrize("way", ["path", "open", "renamed", "pickle"])
def test_averaged_weights_are_loaded_into_the_model(averaged: Path, kind: str, way: str) -> None:
    model, extra = _Net(9.0), {"step": 0}
    rename = _RENAMES[kind](model)
    state = {"model": model, "extra": extra}
    if way == "path":
        report = bcp.load(averaged, state, rename=rename, strict="exact")
        assert report.sources["model.a.weight"] == "ema.module.a.weight"
        assert report.sources.keys() == set(_mapping(model).values())
    else:
        opened = bcp.open(averaged, rename=rename) if way == "open" else bcp.open(averaged).renamed(rename)
        if way == "pickle" and kind != "function":  # which is local here
            opened = pickle.loads(pickle.dumps(opened))
        assert float(opened["model.a.weight"][0, 0]) == 2.0
        assert "ema.module.a.weight" not in opened
        assert len(opened) == len(list(opened))
        assert set(opened.state_dict("model")) == set(_Net(0.0).state_dict()) - {"_extra_state"}
        assert opened.verify().ok
        bcp.load(opened, state, strict="exact")
    assert (_values(model), extra) == ({2.0}, {"step": 3})
    assert model.note == ("new" if kind == "names" else "average")  # what belongs to a module follows a prefix


def test_single_names_of_another_section(averaged: Path) -> None:
    model = _Net(9.0)
    report = bcp.load(averaged, {"model": model}, rename={"ema.module.a.weight": "model.a.weight"})
    assert report.sources == {"model.a.weight": "ema.module.a.weight"}
    assert model.a.weight.tolist()[0][0] == 2.0
    assert {float(one) for one in model.a.bias.tolist()} == {1.0}
    # The name of a section that the checkpoint does not have, and both sections in one load.
    swapped = {"model.": "plain.", **_PREFIX}
    other, plain = _Net(9.0), _Net(9.0)
    bcp.load(averaged, {"model": other, "plain": plain}, rename=swapped)
    assert (_values(other), _values(plain)) == ({2.0}, {1.0})
    with pytest.raises(MismatchError) as caught:
        bcp.load(averaged, {"model": other}, rename={"ema.module.a.weight": "model.a.wieght"})
    assert faults_of(caught, "unexpected") == ["model.a.wieght"]


def test_values_of_another_section_are_renamed(tmp_path: Path) -> None:
    bcp.save(
        tmp_path, {"best": {"step": 5, "list": [1, torch.ones(1)], "more": {"a": 1}}, "extra": {"step": 1, "x": 2}}
    )
    extra: dict[str, Any] = {"step": 0, "x": 0}
    bcp.load(tmp_path, {"extra": extra}, rename={"best.step": "extra.step"})
    assert extra == {"step": 5, "x": 2}
    whole: dict[str, Any] = {}
    bcp.load(tmp_path, {"new": whole}, rename={"best.": "new."})
    assert whole["step"] == 5
    assert whole["list"][1].tolist() == [1.0]
    assert bcp.open(tmp_path, rename={"best.more.": "extra.", "best.step": "extra.more"}).tree("extra") == {
        "step": 1, "x": 2, "a": 1, "more": 5,
    }  # fmt: skip
    for clash in ({"best.step": "extra.n", "best.more.a": "extra.n"}, {"extra.x": "extra.step"}):
        with pytest.raises(NameCollisionError, match="rename maps two stored names"):
            bcp.load(tmp_path, {"extra": extra}, rename=clash, strict=False)


def test_an_optimizer_moves_with_its_model(tmp_path: Path) -> None:
    actor = _Net(1.0)
    optimizer = stepped(actor)
    bcp.save(tmp_path, {"actor": actor, "actor_optimizer": optimizer, "critic": _Net(2.0)})
    rename = {"actor.": "model.", "actor_optimizer.": "optimizer."}
    for given in (rename, lambda name: name.replace("actor_", "").replace("actor.", "model.")):
        model = _Net(9.0)
        target = stepped(model, lr=9.0)
        bcp.load(tmp_path, {"model": model, "optimizer": target}, rename=given)
        assert _values(model) == _values(actor)
        assert target.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_tied_weights_of_an_average(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = model["one"].weight
    average = copy.deepcopy(model)
    with torch.no_grad():
        model["one"].weight.fill_(1.0)
        average["one"].weight.fill_(2.0)
    bcp.save(tmp_path, {"model": model, "ema": average})
    opened = bcp.open(tmp_path, rename={"ema.": "model."})
    assert float(opened["model.one.weight"][0, 0]) == float(opened["model.two.weight"][0, 0]) == 2.0
    # Of two tied names, only one is replaced: the other one still has the bytes of both.
    opened = bcp.open(tmp_path, rename={"ema.one.weight": "model.one.weight"})
    assert (float(opened["model.one.weight"][0, 0]), float(opened["model.two.weight"][0, 0])) == (2.0, 1.0)
    assert not any(name.startswith("ema.one.weight") for name in opened)


def test_exports_imports_and_engines(averaged: Path, tmp_path: Path) -> None:
    options = ["--rename", "ema.module.=model.", "--exclude", "b.bias"]
    ran = CliRunner().invoke(cli, ["export", str(averaged), str(tmp_path / "hf"), *options])
    assert ran.exit_code == 0, ran.output
    found = {**bcp.open(tmp_path / "hf").state_dict(), "b.bias": torch.full((1,), 2.0)}
    assert {float(one) for tensor in found.values() for one in tensor.flatten()} == {2.0}
    assert set(found) == {"a.weight", "a.bias", "b.weight", "b.bias", "mean"}
    opened = bcp.open(averaged, rename=_PREFIX)
    assert {name for name, _ in StoredWeights(opened).tensors()} == set(found)  # what vLLM's loader reads
    source = source_of(bcp.open(averaged), "model", rename=_PREFIX, framework=None, rank=0, world_size=1)
    ((tensor,),) = (source.fetch([box for box in source.held if box[0] == "a.weight"]),)
    assert float(tensor[0, 0]) == 2.0
    torch.save({"model": _Net(1.0).state_dict(), "ema": {"w": torch.full((2,), 2.0), "n": 4}}, tmp_path / "c.pt")
    import_checkpoint(bcp.open(tmp_path / "c.pt", rename={"ema.": "average."}), str(tmp_path / "imported"))
    imported = bcp.open(tmp_path / "imported")
    assert imported.tree("average")["n"] == 4
    assert imported["average.w"][:].tolist() == [2.0, 2.0]


def _nothing(name: str) -> str:
    return name


@pytest.mark.parametrize(
    ("rename", "fault"),
    [
        ({"ema.modul.a.weight": "model.a.weight"}, "ema.modul.a.weight"),
        ({"emma.": "model."}, "emma."),
        ({**_PREFIX, "extra.epoch": "model.note"}, "extra.epoch"),
        (_nothing, "the function _nothing"),
    ],
)
def test_a_rename_that_matches_nothing_is_an_error(averaged: Path, tmp_path: Path, rename: Any, fault: str) -> None:
    model = _Net(9.0)
    calls: list[Callable[[], Any]] = [
        lambda: bcp.load(averaged, {"model": model}, rename=rename, strict=False),
        lambda: bcp.load(bcp.open(averaged), {"model": model}, rename=rename, strict=False),
        lambda: bcp.open(averaged, rename=rename),
        lambda: source_of(bcp.open(averaged), "model", framework=None, rank=0, world_size=1, rename=rename),
    ]
    for call in calls:
        with pytest.raises(MismatchError) as caught:
            call()
        assert faults_of(caught, "rename") == [fault]
        assert fault in str(caught.value)
    assert _values(model) == {9.0}
    live = source_of(model, "model", framework=None, rank=0, world_size=1, rename=rename)
    assert fault in live.unmatched
    if isinstance(rename, Mapping):
        pairs = [part for old, new in rename.items() for part in ("--rename", f"{old}={new}")]
        ran = CliRunner().invoke(cli, ["export", str(averaged), str(tmp_path / "hf"), *pairs])
        assert ran.exit_code == 1
        assert fault in ran.stderr
        assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("rename", [{"weight": "model.weight"}, {"ema.": "model"}, {"": "model."}, {"ema.a": "ema."}])
def test_a_rename_of_no_full_names_is_refused(averaged: Path, rename: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="rename must map full names"):
        bcp.open(averaged, rename=rename)
    with pytest.raises(UsageError, match="no full name"):
        bcp.open(averaged, rename=lambda name: name.rpartition(".")[2])


@pytest.mark.parametrize(
    "rename", [{"old.": "new."}, lambda name: name.replace("old.", "new.")], ids=["keys", "function"]
)
@pytest.mark.parametrize("stored", [{"step": 5, "names": ["a"]}, {}], ids=["values", "empty"])
def test_a_section_without_tensors(tmp_path: Path, rename: Any, stored: dict[str, Any]) -> None:
    """As of an optimizer that has no state yet: its hyper-parameters are values."""
    bcp.save(tmp_path / "c", {"old": stored, "model": {"w": torch.ones(2)}})
    found: dict[str, Any] = dict.fromkeys(stored)
    bcp.load(tmp_path / "c", {"new": found}, rename=rename)
    assert found == stored
    assert bcp.open(tmp_path / "c", rename=rename).tree("new") == stored
