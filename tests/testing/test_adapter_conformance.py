"""The built-in adapters pass the conformance suite, and the suite finds faulty adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import UnserializableError
from bytecheckpoint.frameworks.base import Adapter, Context
from bytecheckpoint.frameworks.module import ModuleAdapter
from bytecheckpoint.frameworks.optimizer import OptimizerAdapter
from bytecheckpoint.frameworks.tree import StatefulAdapter, TreeAdapter
from bytecheckpoint.tensors.shards import SectionSource, SectionTarget, Shard, StoredSection, whole_tensor
from bytecheckpoint.testing import AdapterCase, AdapterConformance


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.register_parameter("tied", model[0].weight)
    return model


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.model = model  # type: ignore[attr-defined]
    return model, optimizer


def _optimizer_content(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    content = {f"{index}.{name}": value for index, one in state["state"].items() for name, value in one.items()}
    return content | {"lr": state["param_groups"][0]["lr"]}


def _tree(seed: int) -> dict[str, Any]:
    return {
        "step": seed,
        "nested": {"values": [seed, 2.5], "table": torch.full((2, 3), float(seed))},
        "name": f"run {seed}",
    }


class _Schedule:
    def __init__(self, seed: int) -> None:
        self.step, self.history = seed, torch.full((5,), float(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.history = state["step"], state["history"]


class TestModuleAdapter(AdapterConformance):
    @pytest.fixture
    def case(self) -> AdapterCase:
        return AdapterCase(adapter=ModuleAdapter(), make=_model, content=lambda model: model.state_dict())


class TestOptimizerAdapter(AdapterConformance):
    @pytest.fixture
    def case(self) -> AdapterCase:
        return AdapterCase(
            adapter=OptimizerAdapter(),
            make=lambda seed: _trained(seed)[1],
            content=_optimizer_content,
            state=lambda optimizer: {"model": optimizer.model, "optimizer": optimizer},
            section="optimizer",
        )


class TestTreeAdapter(AdapterConformance):
    @pytest.fixture
    def case(self) -> AdapterCase:
        return AdapterCase(
            adapter=TreeAdapter(),
            make=_tree,
            content=lambda tree: {**tree, "nested": tree["nested"]["values"], "table": tree["nested"]["table"]},
        )


class TestStatefulAdapter(AdapterConformance):
    @pytest.fixture
    def case(self) -> AdapterCase:
        return AdapterCase(adapter=StatefulAdapter(), make=_Schedule, content=lambda schedule: schedule.state_dict())


class _Box:
    def __init__(self, seed: int) -> None:
        self.tensor = torch.full((4,), float(seed))


class _FaultyAdapter(Adapter):
    """An adapter for ``_Box`` with one fault."""

    name: ClassVar[str] = "faulty"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, _Box) or self.fault == "recognizes everything"

    def capture(self, obj: _Box, context: Context) -> SectionSource:
        meta, box = whole_tensor(obj.tensor.dtype, obj.tensor.shape)
        tensor = obj.tensor.clone() if self.fault == "copies" else obj.tensor
        if self.fault == "changes the object":
            obj.tensor += 1
        shards = [] if self.fault == "loses the shard" else [Shard("tensor", meta, box, tensor)]
        values = {("lock",): object()} if self.fault == "has a value that is not plain" else {}
        return SectionSource({"tensor": meta}, shards, values)

    def target(self, obj: _Box, context: Context, stored: StoredSection) -> SectionTarget:
        meta, box = whole_tensor(obj.tensor.dtype, obj.tensor.shape)
        if self.fault == "clears the target":
            obj.tensor.zero_()
        tensor = torch.empty(4) if self.fault == "loads elsewhere" else obj.tensor
        return SectionTarget({"tensor": meta}, [Shard("tensor", meta, box, tensor)])


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("recognizes everything", "test_recognizes_its_object_only"),
        ("copies", "test_shards_are_views_of_the_object"),
        ("changes the object", "test_capture_changes_nothing"),
        ("loses the shard", "test_shards_tile_their_tensors"),
        ("has a value that is not plain", "test_values_are_plain"),
        ("clears the target", "test_target_changes_nothing_before_apply"),
        ("loads elsewhere", "test_load_restores_the_content"),
    ],
)
def test_the_suite_finds_a_faulty_adapter(fault: str, test: str) -> None:
    def case(fault: str) -> AdapterCase:
        return AdapterCase(adapter=_FaultyAdapter(fault), make=_Box, content=lambda box: {"tensor": box.tensor})

    run = getattr(AdapterConformance(), test)
    run(case(""))
    with pytest.raises((AssertionError, UnserializableError)):
        run(case(fault))
