"""Master weights: stored with the optimizer's state, and loaded into whatever needs the most precise values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.convert.export import export_safetensors
from bytecheckpoint.errors import MismatchError, NameNotFoundError
from bytecheckpoint.frameworks.base import Adapter, Context
from bytecheckpoint.frameworks.optimizer import OptimizerAdapter
from bytecheckpoint.frameworks.optimizer_params import NamedParam, owned_layouts
from bytecheckpoint.frameworks.optimizer_wrappers import StateHolder
from bytecheckpoint.tensors.shards import SectionSource, SectionTarget, Shard, StoredSection, whole_tensor


class MixedPrecision:
    """An optimizer that steps a float32 copy of each bfloat16 parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model_params = [*model.parameters()]
        self.masters = [param.detach().float() for param in self.model_params]
        self.inner = torch.optim.AdamW(self.masters, lr=0.1)

    def step(self) -> None:
        for param, master in zip(self.model_params, self.masters):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.inner.step()
        with torch.no_grad():
            for param, master in zip(self.model_params, self.masters):
                param.copy_(master)


class MixedPrecisionAdapter(OptimizerAdapter):
    name = "test-mixed-precision"
    priority = 20

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, MixedPrecision)

    def describe(self, obj: MixedPrecision, context: Context) -> tuple[list[StateHolder], list[NamedParam]]:
        holder = StateHolder(obj.inner, obj.inner.state, obj.inner.param_groups, layers=(obj.inner,))
        owned = owned_layouts({id(param) for param in obj.model_params}, context)
        (group,) = obj.inner.param_groups
        return [holder], [
            NamedParam(master, own.layout, holder, group, master, master=master, origins=own.origins)
            for param, master in zip(obj.model_params, obj.masters)
            for own in (owned[id(param)],)
        ]


class Padded:
    """A table with padding behind its rows."""

    def __init__(self, rows: int, value: float) -> None:
        self.rows = torch.full((rows, 3), value)


class PaddedAdapter(Adapter):
    name = "test-padded"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, Padded)

    def _shards(self, obj: Padded) -> tuple[dict[str, Any], list[Shard]]:
        meta, _ = whole_tensor(obj.rows.dtype, obj.rows.shape)
        boxes = whole_tensor(torch.float32, torch.Size((2, 3)))[1], whole_tensor(torch.float32, obj.rows.shape)[1]
        first = Shard("rows", meta, boxes[0], obj.rows[:2])
        box = type(boxes[1])((2, 0), (obj.rows.shape[0] - 2, 3))
        return {"rows": meta}, [first, Shard("rows", meta, box, obj.rows[2:])]

    def capture(self, obj: Padded, context: Context) -> SectionSource:
        return SectionSource(*self._shards(obj))

    def target(self, obj: Padded, context: Context, stored: StoredSection) -> SectionTarget:
        return SectionTarget(*self._shards(obj), resizable={"rows": 0})


@pytest.fixture(scope="module", autouse=True)
def adapters() -> None:
    bcp.register_adapter(MixedPrecisionAdapter())
    bcp.register_adapter(PaddedAdapter())


def trained(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, MixedPrecision]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(dtype)
    optimizer = MixedPrecision(model)
    for _ in range(3):
        model(torch.randn(6, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_masters_are_stored_with_the_state(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint = bcp.open(tmp_path / "c")
    assert torch.equal(checkpoint["optimizer.state.0.weight.master"][:], optimizer.masters[0])
    assert torch.equal(checkpoint["model.0.weight"][:], optimizer.model_params[0])

    other_model, other = trained(1)
    report = bcp.load(tmp_path / "c", {"model": other_model, "optimizer": other})
    assert report.sources == {}
    for ours, theirs in zip((*model.parameters(), *optimizer.masters), (*other_model.parameters(), *other.masters)):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(optimizer.inner.state.values(), other.inner.state.values()):
        assert {key: value.tolist() for key, value in ours.items()} == {k: v.tolist() for k, v in theirs.items()}


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_model_of_more_precision_takes_the_masters(tmp_path: Path, with_optimizer: bool) -> None:
    model, optimizer = trained(0)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    full, _ = trained(1, torch.float32)
    plain = torch.optim.AdamW(full.parameters(), lr=0.5)
    report = bcp.load(tmp_path / "c", {"model": full, **({"optimizer": plain} if with_optimizer else {})})
    assert not torch.equal(optimizer.masters[0], optimizer.masters[0].bfloat16().float())
    assert report.sources["model.0.weight"] == "optimizer.state.0.weight.master"
    assert len(report.sources) == 4
    assert not report.cast
    for master, param in zip(optimizer.masters, full.parameters()):
        assert torch.equal(master, param)
    if with_optimizer:
        assert all("master" not in entry for entry in plain.state.values())
        assert torch.equal(
            plain.state[next(full.parameters())]["exp_avg"], optimizer.inner.state[optimizer.masters[0]]["exp_avg"]
        )


def test_a_section_of_its_own_name_finds_its_masters(tmp_path: Path) -> None:
    """Names are qualified with their section if an optimizer steps the parameters of several."""
    (one, _), (other, _) = trained(0), trained(1)
    both = nn.ModuleList([one, other])
    optimizer = MixedPrecision(both)
    bcp.save(tmp_path / "c", {"one": one, "other": other, "optimizer": optimizer})
    full, _ = trained(2, torch.float32)
    report = bcp.load(tmp_path / "c", {"other": full})
    assert report.sources["other.0.weight"] == "optimizer.state.other.0.weight.master"
    assert torch.equal(full[0].weight, optimizer.masters[4])


def test_a_renamed_model_finds_its_masters(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    full, _ = trained(1, torch.float32)
    wrapped = nn.ModuleDict({"net": full})
    bcp.load(tmp_path / "c", {"model": wrapped}, rename=lambda name: name.replace("model.", "model.net."))
    assert torch.equal(full[0].weight, optimizer.masters[0])


@pytest.mark.parametrize("qualified", [False, True])
def test_tensors_of_another_section_are_not_filled_from_the_masters_of_those_they_replace(
    tmp_path: Path, qualified: bool
) -> None:
    (model, optimizer), (average, _) = trained(0), trained(1)
    other, _ = trained(2)
    if qualified:
        optimizer = MixedPrecision(nn.ModuleList([model, other]))
    bcp.save(tmp_path / "c", {"model": model, "other": other, "ema": average, "optimizer": optimizer})
    full, _ = trained(3, torch.float32)
    report = bcp.load(tmp_path / "c", {"model": full}, rename={"ema.": "model."})
    assert report.sources["model.0.weight"] == "ema.0.weight"
    assert torch.equal(full[0].weight, average[0].weight.float())
    report = bcp.load(tmp_path / "c", {"moved": full}, rename={"model.": "moved."})
    assert qualified or report.sources["moved.0.weight"] == "optimizer.state.0.weight.master"


def test_masters_that_are_not_stored_take_the_model(tmp_path: Path) -> None:
    full, _ = trained(0, torch.float32)
    plain = torch.optim.AdamW(full.parameters(), lr=0.5)
    full(torch.randn(6, 4)).sum().backward()
    plain.step()
    bcp.save(tmp_path / "c", {"model": full, "optimizer": plain})
    model, optimizer = trained(1)
    report = bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert report.sources["optimizer.state.0.weight.master"] == "model.0.weight"
    assert report.cast["model.0.weight"] == ("float32", "bfloat16")
    for param, low, master in zip(full.parameters(), model.parameters(), optimizer.masters):
        assert torch.equal(master, param)
        assert torch.equal(low, param.bfloat16())

    # Without the masters, the same values would be lost.
    with pytest.raises(MismatchError, match="dtype"):
        bcp.load(tmp_path / "c", {"model": model})
    with pytest.raises(MismatchError, match=r"missing: 5 (.*\n)*.*optimizer\.state\.0\.bias\.master"):
        bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, strict="exact")


def test_a_copy_of_another_dtype_is_rounded_from_the_stored_master(tmp_path: Path) -> None:
    model, optimizer = trained(0, torch.float16)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other_model, other = trained(1, torch.bfloat16)
    report = bcp.load(tmp_path / "c", {"model": other_model, "optimizer": other})
    assert report.sources["model.0.weight"] == "optimizer.state.0.weight.master"
    for master, low, loaded in zip(optimizer.masters, other_model.parameters(), other.masters):
        assert torch.equal(loaded, master)
        assert torch.equal(low, master.bfloat16())
    with pytest.raises(MismatchError, match="dtype"):
        bcp.load(tmp_path / "c", {"model": other_model})


def test_an_average_of_the_same_names_has_no_masters(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    average, _ = trained(1)  # of the same names, and never stepped
    bcp.save(tmp_path / "c", {"model": model, "ema": average, "optimizer": optimizer})
    full, _ = trained(2, torch.float32)
    report = bcp.load(tmp_path / "c", {"ema": full})
    assert report.sources == {}
    for loaded, saved in zip(full.parameters(), average.parameters()):
        assert torch.equal(loaded, saved.float())


def test_models_of_the_same_names_have_their_own_masters(tmp_path: Path) -> None:
    (model, optimizer), (other_model, other) = trained(0), trained(1)
    for seed, names in enumerate([("a", "opt_a", "b", "opt_b"), ("b", "opt_a", "a", "opt_b")]):
        path = tmp_path / str(seed)
        bcp.save(path, dict(zip(names, (model, optimizer, other_model, other))))
        for name, stepped in ((names[0], optimizer), (names[2], other)):
            full, _ = trained(2, torch.float32)
            bcp.load(path, {name: full})
            for loaded, master in zip(full.parameters(), stepped.masters):
                assert torch.equal(loaded, master)


def test_two_masters_of_one_tensor_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    bcp.save(tmp_path / "c", {"a": model, "opt_1": optimizer, "opt_2": MixedPrecision(model)})
    full, _ = trained(2, torch.float32)
    before = full[0].weight.clone()
    with pytest.raises(MismatchError, match=r"several master weights.*opt_1\.state.*opt_2\.state"):
        bcp.load(tmp_path / "c", {"a": full})
    assert torch.equal(full[0].weight, before)


@pytest.mark.parametrize(("saved", "loaded"), [(5, 8), (8, 5), (5, 5)])
def test_padding_may_differ(tmp_path: Path, saved: int, loaded: int) -> None:
    bcp.save(tmp_path / "c", {"table": Padded(saved, 1.0)})
    table = Padded(loaded, 0.0)
    report = bcp.load(tmp_path / "c", {"table": table})
    assert report.resized == ({} if saved == loaded else {"table.rows": ((saved, 3), (loaded, 3))})
    assert table.rows.sum(1).tolist() == [3.0] * min(saved, loaded) + [0.0] * max(0, loaded - saved)
    plain = {"rows": torch.zeros(saved + 1, 3)}
    with pytest.raises(MismatchError, match="shape"):
        bcp.load(tmp_path / "c", {"table": plain})


def test_an_export_of_the_masters(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "other": {"0.weight": torch.zeros(2)}})
    checkpoint = bcp.open(tmp_path / "c")
    related = {"config.json": json.dumps({"dtype": "bfloat16"}).encode()}
    export_safetensors(checkpoint, tmp_path / "full", masters=True, related=related)
    found = load_file(tmp_path / "full" / "model.safetensors")
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], one) for (name, _), one in zip(model.named_parameters(), optimizer.masters))
    assert json.loads((tmp_path / "full" / "config.json").read_text()) == {"dtype": "float32"}
    with pytest.raises(NameNotFoundError, match="no master weights of section 'other'"):
        export_safetensors(checkpoint, tmp_path / "none", section="other", masters=True)
