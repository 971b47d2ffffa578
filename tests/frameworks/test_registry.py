"""Find the adapter of an object, and report an object without one."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import UnknownObjectError, UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.base import Adapter
from bytecheckpoint.frameworks.layout import ParamLayout
from bytecheckpoint.frameworks.registry import adapter_names, find_adapter, parameter_layouts, register_adapter


class Strange:
    """A type that no built-in adapter supports."""


class StrangeAdapter(Adapter):
    name = "strange"

    def recognizes(self, obj):
        return isinstance(obj, Strange)

    def capture(self, obj, context):
        raise NotImplementedError

    def target(self, obj, context, stored):
        raise NotImplementedError


class SpecialLinear(nn.Linear):
    pass


class SpecialAdapter(StrangeAdapter):
    name, priority = "special", 5

    def recognizes(self, obj):
        return isinstance(obj, SpecialLinear)

    def parameter_layouts(self, obj):
        return {id(obj.weight): ParamLayout.whole("special", tuple(obj.weight.shape))}


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    yield
    registry._plug_ins.cache_clear()


def install(monkeypatch, *points):
    ours = [EntryPoint(name, value, "bytecheckpoint.frameworks") for name, value in points]
    monkeypatch.setattr(registry, "entry_points", lambda group: ours)
    registry._plug_ins.cache_clear()


def test_built_in_adapters_by_object():
    net = nn.Linear(2, 2)
    assert find_adapter(net).name == "module"
    assert find_adapter([net, nn.Linear(2, 2)]).name == "module"
    assert find_adapter(torch.optim.SGD(net.parameters())).name == "optimizer"
    assert find_adapter(torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net.parameters()))).name == "stateful"
    assert find_adapter({"step": 3, "x": torch.ones(1)}).name == "tree"
    assert find_adapter([]).name == "tree"


def test_framework_forces_the_adapter_of_models_only():
    net = nn.Linear(2, 2)
    for name in ("module", "torch", "ddp", "fsdp2", "tp", "pipeline"):
        assert find_adapter(net, name).name == "module"
        assert find_adapter({"step": 3}, name).name == "tree"
        assert find_adapter(torch.optim.SGD(net.parameters()), name).name == "optimizer"
    with pytest.raises(UnknownObjectError, match=r"'model'.*Linear.*framework='fsdp1'.*leave framework out.*module"):
        find_adapter(net, "fsdp1", section="model")
    with pytest.raises(UnknownObjectError, match=r"'horovod' names no adapter; the known ones are: .*fsdp1.*module"):
        find_adapter(net, "horovod")


def test_unknown_object_names_everything():
    with pytest.raises(UnknownObjectError) as error:
        find_adapter(Strange(), section="extra")
    for part in ("section 'extra'", "Strange", "fsdp1, fsdp2, megatron", "register_adapter", "entry point"):
        assert part in str(error.value)


def test_registered_adapters():
    register_adapter(StrangeAdapter())
    register_adapter(SpecialAdapter())
    assert find_adapter(Strange()).name == "strange"
    net = SpecialLinear(2, 2)
    assert find_adapter(net).name == "special"
    assert find_adapter(net, "module").name == "module"
    assert parameter_layouts(net)[id(net.weight)].fqns == {"special": (2, 2)}
    assert parameter_layouts({"a": 1}) == {}
    assert {"strange", "special"} < set(adapter_names())
    for name in ("strange", "module", "tp"):
        taken = StrangeAdapter()
        taken.name = name
        with pytest.raises(UsageError, match="another name"):
            register_adapter(taken)


def test_installed_plug_ins(monkeypatch, caplog):
    install(monkeypatch, ("strange", f"{__name__}:StrangeAdapter"), ("broken", "no_such_module:Adapter"))
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))
    assert find_adapter(Strange()).name == "strange"
    assert "plug-in 'broken'" in caplog.text
    assert {"strange", "broken"} < set(adapter_names())
    with pytest.raises(UsageError, match=r"'broken' \(no_such_module:Adapter\) cannot be loaded"):
        find_adapter(nn.Linear(2, 2), "broken")
    install(monkeypatch, ("strange", "builtins:dict"))
    with pytest.raises(UsageError, match="is not a bytecheckpoint Adapter"):
        find_adapter(nn.Linear(2, 2), "strange")
