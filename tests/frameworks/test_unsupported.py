"""Objects that look like modules and optimizers but keep their parameters or state elsewhere are refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import StateError, UnknownObjectError, UnsupportedTensorError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.base import Adapter
from bytecheckpoint.frameworks.registry import find_adapter


def stand_in(module: str, name: str, *bases: type, **attributes: Any) -> type:
    """A class with the name of another package's class."""
    return type(name, bases, {"__module__": module, "__qualname__": name, **attributes})


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Slots:
    """What Megatron's optimizers have: properties, a state dict, and no base class of torch."""

    param_groups: list[dict[str, Any]] = []

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


Engine = stand_in("deepspeed.runtime.engine", "DeepSpeedEngine", Wrapper)
PipelineEngine = stand_in("deepspeed.runtime.pipe.engine", "PipelineEngine", Engine)
MegatronFSDP = stand_in("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP", Wrapper)
ZeroBase = stand_in("deepspeed.runtime.base_optimizer", "ZeROOptimizer", Slots)
Stage3 = stand_in("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", ZeroBase)
Onebit = stand_in("deepspeed.runtime.fp16.onebit.adam", "OnebitAdam", torch.optim.Adam)
Chained = stand_in("megatron.core.optimizer.optimizer", "ChainedOptimizer", Slots)
FusedAdam = stand_in("deepspeed.ops.adam.fused_adam", "FusedAdam", torch.optim.Adam)


class Prepared(torch.optim.SGD):
    """A trainer's wrapper around an optimizer."""

    def __init__(self, inner: Any, params: Any) -> None:
        super().__init__(params)
        self.inner = inner


def partitioned() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    weight: Any = model[1].weight
    weight.data = torch.empty(0)
    weight.ds_id, weight.ds_shape, weight.ds_tensor = 3, torch.Size((2, 3)), torch.ones(6)
    return model


def offloaded() -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(offload=True),))
    return model


def freed() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data = torch.ones(8)[4:].view(2, 2)
    model.weight.untyped_storage().resize_(0)
    return model


def prepared() -> Any:
    params = list(nn.Linear(2, 2).parameters())
    return Prepared(Chained(torch.optim.SGD(params)), params)


CASES = {
    "engine": (lambda: Engine(nn.Linear(2, 2)), UnknownObjectError, "DeepSpeedEngine"),
    "pipeline engine": (lambda: PipelineEngine(nn.Linear(2, 2)), UnknownObjectError, "PipelineEngine"),
    "engine in a module": (lambda: nn.Sequential(Engine(nn.Linear(2, 2))), UnknownObjectError, "DeepSpeedEngine"),
    "engine in a list": (lambda: [nn.Linear(1, 1), Engine(nn.Linear(2, 2))], UnknownObjectError, "DeepSpeedEngine"),
    "engine in a tree": (lambda: {"a": Engine(nn.Linear(2, 2))}, UnknownObjectError, r"x\.a.*DeepSpeedEngine"),
    "megatron-fsdp": (lambda: Wrapper(MegatronFSDP(nn.Linear(2, 2))), UnknownObjectError, "MegatronFSDP"),
    "accelerate": (lambda: nn.Sequential(offloaded()), UnknownObjectError, "accelerate"),
    "zero-3 parameter": (partitioned, UnsupportedTensorError, r"x: 1\.weight.*ZeRO-3"),
    "zero-3 state dict": (
        lambda: dict(partitioned().named_parameters()),
        UnsupportedTensorError,
        r"x: 1\.weight.*ZeRO-3",
    ),
    "freed memory": (freed, UnsupportedTensorError, "x: weight.*freed"),
    "zero optimizer": (lambda: Stage3(None), UnknownObjectError, "DeepSpeedZeroOptimizer_Stage3"),
    "1-bit Adam": (lambda: Onebit(nn.Linear(2, 2).parameters()), UnknownObjectError, "OnebitAdam"),
    "megatron": (lambda: [Chained(None), Chained(None)], UnknownObjectError, "ChainedOptimizer"),
    "megatron in a wrapper": (prepared, UnknownObjectError, "ChainedOptimizer"),
    "megatron in a tree": (lambda: {"a": [Chained(None)]}, UnknownObjectError, "ChainedOptimizer"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_save_warmup_manager_and_load(case: str, tmp_path: Path) -> None:
    make, error, message = CASES[case]
    bcp.save(tmp_path / "other", {"x": nn.Linear(1, 1)})
    obj = make()
    with pytest.raises(error, match=message):
        bcp.save(tmp_path / "new", {"x": obj})
    assert not (tmp_path / "new").exists()
    with pytest.raises(error, match=message):
        bcp.warmup({"x": obj})
    with pytest.raises(error, match=message):
        bcp.load(tmp_path / "other", {"x": obj}, strict=False)
    if isinstance(obj, nn.Module):
        with pytest.raises(error, match=message):
            bcp.save(tmp_path / "new", {"x": obj}, options=bcp.SaveOptions(framework="module"))
    with bcp.CheckpointManager(tmp_path / "runs") as manager, pytest.raises(error, match=message):
        manager.save(1, {"x": obj}, force=True)


def test_parameters_with_a_copy_in_a_zero_optimizer_are_saved_but_not_loaded(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    model.weight._hp_mapping, model.bias._hp_mapping = object(), None
    before = model.weight.detach().clone()
    bcp.save(tmp_path / "a", {"model": model})
    with pytest.raises(StateError, match=r"'model': weight: DeepSpeed's ZeRO optimizer"):
        bcp.load(tmp_path / "a", {"model": model})
    assert torch.equal(model.weight, before)


def test_plain_parts_of_these_frameworks_are_accepted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    scheduler = stand_in("deepspeed.runtime.lr_schedules", "WarmupLR", Slots)
    scaler = stand_in("megatron.core.optimizer.grad_scaler", "DynamicGradScaler", Slots, param_groups=None)
    state = {"model": model, "optimizer": FusedAdam(model.parameters()), "s": scheduler(None), "t": [scaler(None)]}
    bcp.save(tmp_path / "a", state)


def test_an_adapter_for_the_class_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    class EngineAdapter(Adapter):
        name, priority = "deepspeed-test", 20

        def recognizes(self, obj: object) -> bool:
            return isinstance(obj, Engine)

        capture = target = None  # type: ignore[assignment]

    bcp.register_adapter(EngineAdapter())
    assert find_adapter(Engine(nn.Linear(2, 2))).name == "deepspeed-test"
    with pytest.raises(UnknownObjectError, match="contains a deepspeed"):
        find_adapter(nn.Sequential(Engine(nn.Linear(2, 2))))
