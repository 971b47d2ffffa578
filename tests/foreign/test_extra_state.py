"""Extra state of modules in the form of torch's state dicts, in which a module's name comes first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError


class _Counted(nn.Linear):
    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


STATES: dict[str, tuple[Any, Any]] = {
    "mapping": ({"calls": 5, "scale": torch.arange(3)}, {"calls": 7, "scale": torch.arange(4)}),
    "number": (5, 7),
    "tensor": (torch.arange(3), torch.arange(5)),
    "nothing": (None, None),
    "sequence": ([1, {"calls": 2}], [torch.ones(2)]),
}
SAVES: dict[str, Callable[[str, nn.Module], Any]] = {
    "torch.save": lambda path, model: torch.save(model.state_dict(), path),
    "torch.save of a dict": lambda path, model: torch.save({"model": model.state_dict()}, path),
    "DCP": lambda path, model: dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True),
    "DCP of a model": lambda path, model: dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True),
    "bcp.dcp.Writer": lambda path, model: dcp.save(
        {"model": model.state_dict()}, storage_writer=bcp.dcp.Writer(path), no_dist=True
    ),
    "a state dict": lambda path, model: bcp.save(path, {"model": model.state_dict()}),
    "the module": lambda path, model: bcp.save(path, {"model": model}),
}


def _model(state: tuple[Any, Any], *, is_root: bool) -> nn.Module:
    first, second = _Counted(3, 4), _Counted(4, 2)
    first.held, second.held = copy.deepcopy(state)
    return first if is_root else nn.Sequential(first, nn.ReLU(), second)


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(child) for key, child in value.items()}
    return [_blank(child) for child in value] if isinstance(value, list) else 0


def _held(model: nn.Module) -> list[Any]:
    return [module.held for module in model.modules() if isinstance(module, _Counted)]


@pytest.mark.parametrize("is_root", [False, True], ids=["inside", "root"])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("save", SAVES)
def test_a_module_gets_its_extra_state(save: str, kind: str, is_root: bool, tmp_path: Path) -> None:
    model = _model(STATES[kind], is_root=is_root)
    SAVES[save](str(tmp_path / "saved"), model)
    target = _model(STATES[kind], is_root=is_root)
    for module in target.modules():
        if isinstance(module, _Counted):
            module.held = _blank(module.held)
    bcp.load(tmp_path / "saved", {"model": target})
    assert len(_held(target)) == 2 - is_root
    torch.testing.assert_close(_held(target), _held(model), rtol=0, atol=0)


def test_missing_extra_state_is_reported(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict(), tmp_path / "plain.pt")
    with pytest.raises(MismatchError, match=r"missing: 2 .*\n +model\._extra_state\.0"):
        bcp.load(tmp_path / "plain.pt", {"model": _model((5, 7), is_root=False)})


@pytest.mark.parametrize("is_root", [False, True], ids=["inside", "root"])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("save", SAVES)
def test_a_state_dict_gets_the_extra_state_of_modules(save: str, kind: str, is_root: bool, tmp_path: Path) -> None:
    model = _model(STATES[kind], is_root=is_root)
    SAVES[save](str(tmp_path / "saved"), model)
    state = {name: _blank(value) for name, value in _model(STATES[kind], is_root=is_root).state_dict().items()}
    bcp.load(tmp_path / "saved", {"model": state})
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
