"""Renaming, strictness, casts and the report of a load."""

from __future__ import annotations

import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_backend import CountingBackend
from mismatches import faults_of
from small_training import differing, memory, plain_model, stepped, training
from sorted_arguments import loading
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import location
from bytecheckpoint.errors import MismatchError, StateError, UsageError
from bytecheckpoint.frameworks.base import Context
from bytecheckpoint.frameworks.sections import Section, undone_on_failure
from bytecheckpoint.frameworks.tree import TreeAdapter
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.telemetry import LOAD_STEPS

# -- renaming ----------------------------------------------------------------------------------------------------------


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
def test_renaming_a_parameter_renames_its_optimizer_state(saved: Path, rename: Any) -> None:
    model = _Renamed()
    optimizer = stepped(model, 2, lr=9.0)
    report = bcp.load(saved, {"model": model, "optimizer": optimizer}, rename=rename)
    requested = training(1.0)
    assert torch.equal(model.second.weight, requested["model"][1].weight)
    loaded, expected = optimizer.state_dict(), requested["optimizer"].state_dict()
    assert loaded["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(loaded["state"][index][key], value), (index, key)
    assert "optimizer.state.second.weight.exp_avg" in report.loaded
    assert not report.lazy


def test_a_missing_name_is_reported_with_a_suggestion(saved: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, {"model": {"0.wieght": torch.zeros(7, 5), "count": torch.zeros((), dtype=torch.int64)}})
    assert "model.0.wieght (did you mean 'model.0.weight'?)" in str(caught.value)
    assert "rename= maps other names" in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "requested", "words"),
    [
        (None, torch.zeros(2), "stored as None, requested as a tensor float32 [2]"),
        (0.5, torch.zeros(()), "stored as a plain value (float), requested as a tensor float32 []"),
        ([torch.zeros(1)], torch.zeros(1), "stored as a list, requested as a tensor float32 [1]"),
        (torch.zeros(2), None, "stored as a tensor float32 [2], requested as a plain value"),
    ],
)
def test_a_tensor_and_a_plain_value_of_one_name_are_one_fault(
    tmp_path: Path, stored: object, requested: object, words: str
) -> None:
    bcp.save(tmp_path, {"extra": {"best": stored, "step": 1}})
    state = {"extra": {"best": requested, "step": 0}}
    with pytest.raises(MismatchError, match=re.escape(f"extra.best: {words}")) as caught:
        bcp.load(tmp_path, state)
    assert [fault for fault in caught.value.faults if fault[1] == "extra.best"] == [("kind", "extra.best", words)]
    assert "did you mean 'extra.best'" not in str(caught.value)
    assert "extra.best" in bcp.load(tmp_path, state, strict=False).missing
    bcp.load(tmp_path, state, exclude=["extra.best*"])


def test_renaming_and_excluding_use_the_names_of_the_state(saved: Path) -> None:
    """A renamed entry that the state does not have is excluded by its new name, in the optimizer, too."""
    model = nn.Module()
    model.register_module("first", plain_model(9.0)[0])
    optimizer = stepped(model)
    options: dict[str, Any] = {"rename": _by_function}
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, {"model": model, "optimizer": optimizer}, **loading(**options))
    assert faults_of(caught, "unexpected") == ["model.count", "model.second.bias", "model.second.weight"]
    exclude = ["model.count", "*.second.*"]
    bcp.load(saved, {"model": model, "optimizer": optimizer}, exclude=exclude, strict="exact", **loading(**options))
    assert torch.equal(model.first.weight, training(1.0)["model"][0].weight)


def test_renaming_in_a_section_of_another_name(tmp_path: Path) -> None:
    """An optimizer's state follows its parameter in any section."""
    actor, critic = plain_model(1.0), plain_model(2.0)
    state = {"actor": actor, "actor_optimizer": stepped(actor), "critic": critic}
    bcp.save(tmp_path, state)
    other = _Renamed()
    optimizer = stepped(other, 2)
    rename = {name.replace("model.", "actor."): new.replace("model.", "actor.") for name, new in _MAP.items()}
    bcp.load(tmp_path, {"actor": other, "actor_optimizer": optimizer}, rename=rename)
    stored = state["actor_optimizer"].state_dict()["state"]
    assert all(torch.equal(optimizer.state_dict()["state"][i]["exp_avg"], stored[i]["exp_avg"]) for i in stored)
    # An optimizer of both modules names its parameters with their sections.
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
        with pytest.raises(StateError, match=r"rename maps two stored names, \S+ and \S+, to"):
            bcp.load(saved, state, rename=rename, strict=False)
        assert not differing(before, memory(state))
    with pytest.raises(UsageError, match="rename returned None"):
        bcp.load(saved, training(9.0), rename=lambda name: None)  # type: ignore[arg-type,return-value]


def test_values_are_renamed_too(saved: Path) -> None:
    extra = {"global_step": 0}
    bcp.load(saved, {"extra_state": extra}, rename={"extra_state.step": "extra_state.global_step"}, strict=False)
    assert extra == {"global_step": 1}


# -- strictness --------------------------------------------------------------------------------------------------------


def test_one_error_lists_everything(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 4).double(), nn.Linear(1, 1))
    model.register_buffer("count", torch.zeros(()))
    state: dict[str, Any] = {
        "model": model,
        "extra_state": {"step": 0, "steps": 1, "table": torch.zeros(6, dtype=torch.int32)},
    }
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, state)
    assert faults_of(caught, "missing") == ["extra_state.steps", "model.2.bias", "model.2.weight"]
    assert faults_of(caught, "unexpected") == ["extra_state.best", "extra_state.name", "model.0.bias"]
    assert faults_of(caught, "shape") == ["model.1.bias", "model.1.weight"]
    assert faults_of(caught, "dtype") == ["extra_state.table", "model.count"]
    results = str(caught.value)
    assert "(10 fault(s)); nothing was changed" in results
    assert "model.1.weight: stored [3, 7], requested [4, 7]" in results
    assert "extra_state.table: stored as float32, requested as int32: no meaningful cast exists" in results
    assert "extra_state.steps (did you mean 'extra_state.step'?)" in results
    assert str(saved) in results
    assert state["extra_state"]["step"] == 0


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


def test_a_new_head_is_skipped(saved: Path) -> None:
    """Tensors of another shape stay as they are, on the meta device too, and the report lists them."""
    stored = training(1.0)["model"]
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    head = model[1].weight.detach().clone()
    with pytest.raises(MismatchError, match=r"strict=\{'model': 'skip_mismatched'\} leaves them") as caught:
        bcp.load(saved, {"model": model}, strict=False)
    assert faults_of(caught, "shape") == ["model.1.bias", "model.1.weight"]
    report = bcp.load(saved, {"model": model}, strict={"model": "skip_mismatched"})
    assert report.mismatched == {"model.1.weight": ((3, 7), (4, 7)), "model.1.bias": ((3,), (4,))}
    assert "2 mismatched" in str(report)
    assert not report.unexpected
    assert torch.equal(model[1].weight, head)
    assert torch.equal(model[0].weight, stored[0].weight)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4))
        empty.register_buffer("count", torch.zeros((), dtype=torch.int64))
        tree = {"table": torch.zeros(3), "step": 0, "name": "", "best": []}
    bcp.load(saved, {"model": empty, "extra_state": tree}, strict="skip_mismatched")
    assert [parameter.is_meta for parameter in empty.parameters()] == [False, False, True, True]
    assert tree["table"].is_meta
    del model[1]
    with pytest.raises(MismatchError) as caught:
        bcp.load(saved, {"model": model}, strict="skip_mismatched")
    assert faults_of(caught, "unexpected") == ["model.1.bias", "model.1.weight"]


def test_state_of_an_optimizer_for_another_shape_is_a_fault(tmp_path: Path) -> None:
    old, new = nn.Linear(4, 3), nn.Linear(4, 5)
    optimizer = torch.optim.Adam(old.parameters())
    old(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": old, "optimizer": optimizer})
    fresh = torch.optim.Adam(new.parameters())
    state = {"model": new, "optimizer": fresh}
    with pytest.raises(MismatchError, match=r"optimizer\.state\.weight\.exp_avg\b") as caught:
        bcp.load(tmp_path, state, strict={"model": "skip_mismatched"})
    assert {kind for kind, *_ in caught.value.faults} == {"shape"}
    assert not fresh.state
    report = bcp.load(tmp_path, state, strict="skip_mismatched")
    assert report.mismatched["optimizer.state.weight.exp_avg"] == ((3, 4), (5, 4))
    new(torch.ones(2, 4)).sum().backward()
    fresh.step()


@pytest.mark.parametrize("strict", ["sometimes", {"model": "sometimes"}, {"nowhere": True}, 3])
def test_invalid_strictness_is_refused(saved: Path, strict: Any) -> None:
    with pytest.raises(UsageError, match=r"strict (must be|names sections)"):
        bcp.load(saved, training(9.0), strict=strict)


def test_exact_accepts_trees_of_the_same_structure(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        inner = {"b": torch.full((2,), value), "a": value, "list": [{"x": value, "y": torch.full((3,), value)}]}
        return {"extra": {"inner": inner, "rank": bcp.PerRank({"p": value, "q": value}), "pair": (value, value)}}

    bcp.save(tmp_path, tree(1.0))
    loaded = tree(0.0)
    assert not bcp.load(tmp_path, loaded, strict="exact").unexpected
    assert loaded["extra"]["inner"]["a"] == loaded["extra"]["inner"]["list"][0]["x"] == 1.0
    del loaded["extra"]["inner"]["list"][0]["x"], loaded["extra"]["inner"]["a"]
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, loaded, strict="exact")
    assert sorted(fault[:2] for fault in caught.value.faults) == [
        ("unexpected", "extra.inner.a"),
        ("unexpected", "extra.inner.list.0.x"),
    ]


@pytest.mark.parametrize("strict", [True, "exact"])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_model_takes_its_stored_state_dict(tmp_path: Path, kind: type, strict: Any) -> None:
    saved, loaded = plain_model(1.0), plain_model(9.0)
    bcp.save(tmp_path, {"model": kind(saved.state_dict())})
    bcp.load(tmp_path, {"model": loaded}, strict=strict)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


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
    assert all("optimizer." in name and ".1." in name for name in faults_of(caught, "unexpected"))
    bcp.load(tmp_path, {"model": half, "optimizer": optimizer}, strict={"model": False})


# -- casts -------------------------------------------------------------------------------------------------------------


def _cast(tmp_path: Path, stored: torch.Tensor, requested: torch.dtype, cast: str) -> torch.Tensor:
    path = tmp_path / f"{stored.dtype}".replace(".", "-")
    bcp.save(path, {"model": {"w": stored}})
    target = torch.zeros(stored.shape, dtype=requested)
    report = bcp.load(path, {"model": {"w": target}}, cast=cast)  # type: ignore[arg-type]
    if stored.dtype != requested:
        names = tuple(str(dtype).removeprefix("torch.") for dtype in (stored.dtype, requested))
        assert report.cast == {"model.w": names}
        assert "1 cast" in str(report)
    return target


def test_widening_is_allowed_and_reported(tmp_path: Path) -> None:
    stored = torch.tensor([1.5, -2.25, float("inf")], dtype=torch.bfloat16)
    assert torch.equal(_cast(tmp_path, stored, torch.float32, "widen"), stored.float())
    assert torch.equal(_cast(tmp_path, torch.tensor([True, False]), torch.int32, "widen"), torch.tensor([1, 0]).int())
    with pytest.raises(MismatchError, match="stored as bfloat16, requested as float32: cast='widen' allows it"):
        _cast(tmp_path, stored, torch.float32, "exact")


def test_rounding_casts_need_permission(tmp_path: Path) -> None:
    stored = torch.tensor([1.1, 3.3])
    for requested in (torch.bfloat16, torch.float16):
        with pytest.raises(MismatchError, match=r"stored as float32, requested as \w+: cast='any' allows it"):
            _cast(tmp_path, stored, requested, "widen")
        assert torch.equal(_cast(tmp_path, stored, requested, "any"), stored.to(requested))
    wide = torch.tensor([2**40], dtype=torch.int64)
    with pytest.raises(MismatchError, match="cast='any' allows it"):
        _cast(tmp_path, wide, torch.float32, "widen")


def test_floats_are_never_cast_to_integers(tmp_path: Path) -> None:
    for requested in (torch.int32, torch.uint8, torch.bool):
        with pytest.raises(MismatchError, match="no meaningful cast exists"):
            _cast(tmp_path, torch.tensor([1.0, 2.0]), requested, "any")
    with pytest.raises(MismatchError, match="no meaningful cast exists"):
        _cast(tmp_path, torch.tensor([1.0 + 2j]), torch.float32, "any")
    with pytest.raises(UsageError, match="cast must be"):
        bcp.load(tmp_path, {"model": {}}, cast="sometimes")  # type: ignore[arg-type]


def test_a_cast_of_a_model_and_its_optimizer(saved: Path) -> None:
    """Load float32 master weights into a float64 run."""
    model = plain_model(9.0).double()
    optimizer = stepped(model, 1)
    report = bcp.load(saved, {"model": model, "optimizer": optimizer})
    assert torch.equal(model[0].weight, training(1.0)["model"][0].weight.double())
    assert report.cast["model.0.weight"] == ("float32", "float64")
    assert report.cast["optimizer.state.0.weight.exp_avg"] == ("float32", "float64")
    assert "model.count" not in report.cast


# -- reports -----------------------------------------------------------------------------------------------------------


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
    assert report.bytes_requested == bcp.open(saved).manifest.nbytes
    assert report.bytes_read >= report.bytes_requested
    assert list(report.timings.seconds) == list(LOAD_STEPS)
    assert f"{len(report.loaded)} loaded" in str(report)
    assert f"{report.bytes_read} bytes read" in str(report)


# -- nothing changes when anything is wrong ----------------------------------------------------------------------------


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


def test_undo_runs_in_reverse_order_and_completely() -> None:
    """Sections may share a tensor: the one that got memory first must be the last to give it back."""
    done: list[str] = []

    def fail() -> None:
        done.append("b2")
        raise RuntimeError("an undo that fails")

    contexts = [Context("a", {}), Context("b", {})]
    contexts[0].undo.extend([lambda: done.append("a1"), lambda: done.append("a2")])
    contexts[1].undo.extend([lambda: done.append("b1"), fail])
    sections = [Section(context.section, {}, TreeAdapter(), context) for context in contexts]
    with pytest.raises(MismatchError, match="the fault"), undone_on_failure(sections):
        raise MismatchError("the fault")
    assert done == ["b2", "b1", "a2", "a1"]


# -- reads -------------------------------------------------------------------------------------------------------------


def test_each_values_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path, {"extra": {"own": bcp.PerRank(3), "shared": 5}})
    opened: list[CountingBackend] = []

    def open_counting(url: str, **options: Any) -> CountingBackend:
        opened.append(CountingBackend(open_backend(url, **options)))
        return opened[-1]

    monkeypatch.setattr(location, "open_backend", open_counting)
    extra = {"own": bcp.PerRank(0), "shared": 0}
    bcp.load(tmp_path, {"extra": extra})
    assert extra["shared"] == 5
    (backend,) = opened
    assert [backend.count("get", key) for key in ("*/extra*.rank.msgpack", "*/extra*.msgpack")] == [1, 2]


class Keeper:
    """A stateful object that can be referred to weakly."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def test_a_load_keeps_nothing_of_the_state_alive(tmp_path: Path) -> None:
    """Memory would be freed late, and the workers of a loader that the garbage collector frees must be killed."""
    keeper = Keeper()
    alive = weakref.ref(keeper)
    state = {"model": torch.nn.Linear(2, 2), "extra_state": {"keeper": keeper}}
    bcp.save(tmp_path, state)
    gc.collect()
    gc.disable()
    try:
        bcp.load(tmp_path, state)
        del keeper, state
        assert alive() is None
    finally:
        gc.enable()
