"""Divide the object in another system's file into sections, by the names that training scripts commonly use.

A file may hold a model's state dict alone, an optimizer's, or a mapping such as ``{"model_state_dict": ..., "epoch":
3}``. Optimizers get the names that the adapters of live ones use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from ..format.values.types import UnreadObject, is_number
from ..frameworks.module_tree import clean_name
from ..frameworks.optimizer_groups import group_path
from ..frameworks.optimizer_state import MASTER, MASTERS_OF, empty_state_path, state_name, state_path
from ..frameworks.sections import is_section_name
from .building import IndexBuilder, StoredLeaf

MODEL_SECTION, OPTIMIZER_SECTION, EXTRA_SECTION = "model", "optimizer", "extra_state"

_COMMON_NAMES = {
    MODEL_SECTION: ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights"),
    OPTIMIZER_SECTION: (
        *("optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim", "optim_state_dict"),
        *("optimizers", "opt"),
    ),
    "lr_scheduler": (
        *("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict"),
        "scheduler_state",
    ),
}
_SECTION_OF = {name: section for section, names in _COMMON_NAMES.items() for name in names}


def sections_of(tree: Any) -> dict[str, Any]:
    """Return the parts of a tree of plain values and ``StoredLeaf``s by section.

    A state dict of a model or an optimizer alone is the section ``model`` or ``optimizer``. Of any other mapping, each
    item with contents is a section, under the common name of what it holds; plain values without a name of their own
    form the section ``extra_state``. Tensors with dotted names next to them are the model, unless there is another one.
    """
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        return {EXTRA_SECTION: tree}
    if len(tree) == 1:
        ((name, inner),) = tree.items()
        if name.lower() not in _SECTION_OF and isinstance(inner, dict) and _SECTION_OF.keys() & inner.keys():
            return sections_of(inner)  # such as {"app": {"model": ..., "optimizer": ...}}
    if is_state_dict(tree):
        return {MODEL_SECTION: module_names(tree)}
    if tree.keys() >= {"state", "param_groups"}:
        return {OPTIMIZER_SECTION: _with_numbers(tree)}
    model = {name: value for name, value in tree.items() if _is_of_module(name, value)}
    if any("." in name for name in model) and not any(_SECTION_OF.get(name.lower()) == MODEL_SECTION for name in tree):
        rest = {name: value for name, value in tree.items() if name not in model}
        tree = {MODEL_SECTION: model, **rest}  # torchtitan does not nest the model
    sections: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in tree.items():
        section = _SECTION_OF.get(name.lower()) or name
        if section in sections or (section != name and section in tree):
            section = name
        if isinstance(value, (list, tuple)) and len(value) == 1 and section != name:
            value = value[0]  # Lightning's lists of one optimizer and one scheduler
        if section == EXTRA_SECTION and isinstance(value, dict):
            extra.update(value)
        elif not isinstance(value, (dict, list, tuple, StoredLeaf)) or not is_section_name(section):
            extra[name] = value
        else:
            sections[section] = module_names(value) if is_state_dict(value) else _with_numbers(value)
    if extra or not sections:
        sections[EXTRA_SECTION] = extra
    return sections


def _with_numbers(tree: Any) -> Any:
    """A state dict of an optimizer with the numbers of its parameters as integers, which DCP turns into text."""
    state, groups = (tree.get("state"), tree.get("param_groups")) if isinstance(tree, dict) else (None, None)
    if not isinstance(state, dict) or not isinstance(groups, list):
        return tree
    params = [group.get("params", []) if isinstance(group, dict) else None for group in groups]
    is_numbered = all(isinstance(one, list | tuple) and all(type(key) is int for key in one) for one in params)
    if not is_numbered or not all(isinstance(key, str) and is_number(key) for key in state):
        return tree
    return {**tree, "state": {int(key): value for key, value in state.items()}}


def is_state_dict(tree: object) -> TypeGuard[dict[str, Any]]:
    """Whether a tree is a model's state dict: tensors under dotted names, and possibly extra states.

    Tensors of classes that are not read count as tensors.
    """
    if not isinstance(tree, dict) or not any(isinstance(value, StoredLeaf) for value in tree.values()):
        return False
    return all(isinstance(key, str) and _is_of_module(key, value) for key, value in tree.items())


def _is_of_module(name: str, value: object) -> bool:
    is_unread_tensor = isinstance(value, UnreadObject) and value.what.startswith("a tensor of class ")
    return isinstance(value, StoredLeaf) or is_unread_tensor or name.endswith("_extra_state")


def module_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict under the names of the module itself, without those of wrappers such as DDP."""
    names = {name: clean_name(name) for name in state_dict}
    if names and all(name.startswith("module.") for name in names.values()):
        names = {name: clean.removeprefix("module.") for name, clean in names.items()}
    if len(set(names.values())) != len(names):
        return dict(state_dict)
    return {names[name]: value for name, value in state_dict.items()}


def step_of(tree: Any) -> int | None:
    """The number of optimizer steps in a tree of a training, if it is stored."""
    found = [tree[key] for key in ("global_step", "step", "iteration") if isinstance(tree, dict) and key in tree]
    return found[0] if found and type(found[0]) is int and found[0] >= 0 else None


class OptimizerWriter:
    """Adds the state of an optimizer by the names of its parameters, as the adapters of live optimizers store it."""

    def __init__(self, builder: IndexBuilder) -> None:
        self._builder, self._has_masters = builder, False
        builder.add_section(OPTIMIZER_SECTION, "optimizer")

    def add(
        self, fqn: str, state: Mapping[str, Any], options: Mapping[str, Any] | None, master: StoredLeaf | None
    ) -> None:
        """Add what is stored of a parameter.

        ``state`` has ``StoredLeaf``s and plain values. ``options`` are the hyper-parameters, if they are stored, and
        ``master`` are the weights that the optimizer steps, if those of the model are rounded from them.
        """
        if options is not None:
            self._builder.add_value(OPTIMIZER_SECTION, group_path(fqn), options)
        if not state:
            self._builder.add_value(OPTIMIZER_SECTION, empty_state_path(fqn), {})
        if master is not None and not self._has_masters:
            self._has_masters = True
            self._builder.add_value(OPTIMIZER_SECTION, MASTERS_OF, MODEL_SECTION)
        for key, found in (state if master is None else {**state, MASTER: master}).items():
            if isinstance(found, StoredLeaf):
                self._builder.add_tensor(OPTIMIZER_SECTION, state_name(fqn, key), found)
            else:
                self._builder.add_value(OPTIMIZER_SECTION, state_path(fqn, key), found)
