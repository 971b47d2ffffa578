"""State dicts of optimizers as targets of what a live optimizer, or another kind of state dict, has stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import MismatchError
from ..tensors.shards import SectionTarget, StoredSection
from .base import Context
from .dtensor import dtensor_layout, is_dtensor
from .layout import ParamLayout
from .module_tree import modules_of, named_slots
from .optimizer import fill_by_name
from .optimizer_params import NamedParam
from .optimizer_wrappers import StateHolder
from .stored_state_dict import is_numbered, is_stored_state_dict, names_of_group
from .tree import TreeAdapter


class StateTreeAdapter(TreeAdapter):
    """Trees. The state dict of an optimizer among them also loads what the optimizer itself has stored.

    Its parameters have names, or numbers. Numbers stand for the parameters of the model in the same state, in order, if
    there is one group with as many parameters; for other state dicts with numbers, the load raises ``MismatchError``.
    """

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        if not _is_state_dict(obj) or not _is_other_kind(obj, stored):
            return super().target(obj, context, stored)
        holder = StateHolder(None, obj["state"], obj["param_groups"])
        return fill_by_name([holder], _params_of(holder, context, stored), context, stored)


def _is_state_dict(obj: object) -> bool:
    if not isinstance(obj, Mapping) or obj.keys() != {"state", "param_groups"}:
        return False
    groups = obj["param_groups"]
    if not isinstance(obj["state"], dict) or not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)


def _is_other_kind(obj: Mapping[str, Any], stored: StoredSection) -> bool:
    """Whether the section is not stored as a state dict whose parameters have keys of the same type."""
    if not is_stored_state_dict(stored.values):
        return any(path[:1] == ("param_groups",) and len(path) == 2 for path in stored.values)
    theirs = {type(key) for path, keys in stored.values.items() if path[-1:] == ("params",) for key in keys}
    ours = {type(key) for group in obj["param_groups"] for key in group["params"]}
    return theirs != ours


def _params_of(holder: StateHolder, context: Context, stored: StoredSection) -> list[NamedParam]:
    model = dict(_model_params(context))
    names = _names_of(holder, context, model)
    result = []
    for key, name, group in names:
        tensors = [t for t in holder.state.get(key, {}).values() if isinstance(t, torch.Tensor) and t.ndim]
        found = model.get(name)
        if found is not None:
            param, layout = found
        elif tensors and is_dtensor(tensors[0]):
            param, layout = tensors[0], dtensor_layout(name, tensors[0])
        else:
            shapes = [meta.shape for fqn, meta in stored.metas.items() if fqn.startswith(f"state.{name}.")]
            param = (
                tensors[0]
                if tensors
                else torch.empty(max(shapes, key=len, default=()), dtype=torch.float32, device="meta")
            )
            layout = ParamLayout.whole(name, tuple(param.shape))
        result.append(NamedParam(param, layout, holder, group, key))
    return result


def _model_params(context: Context) -> Iterator[tuple[str, tuple[torch.Tensor, ParamLayout]]]:
    """The parameters of the modules in the state by name, unless FSDP-1 has flattened them."""
    for value in context.state.values():
        modules = modules_of(value)
        layouts = context.layouts_of(value) if modules else {}
        for slot in named_slots(modules):
            layout = layouts.get(id(slot.tensor)) if slot.is_parameter else None
            if layout is not None and (is_dtensor(slot.tensor) or layout.one_whole is not None):
                yield next(iter(layout.fqns)), (slot.tensor, layout)


def _names_of(
    holder: StateHolder, context: Context, model: Mapping[str, tuple[torch.Tensor, ParamLayout]]
) -> list[tuple[Any, str, Any]]:
    """Key, name and group of every parameter."""
    if not is_numbered(holder.groups):
        return [
            (key, name, group)
            for group in holder.groups
            for key, name in zip(group["params"], names_of_group(group) or (), strict=True)
        ]
    (group, *others) = holder.groups
    keys = group["params"]
    trained = {name: pair for name, pair in model.items() if pair[0].requires_grad}
    candidates = [found for found in (model, trained) if len(found) == len(keys) and not others]
    for found in candidates[:1]:
        if all(
            tensor.shape == param.shape
            for key, (param, _) in zip(keys, found.values(), strict=True)
            for tensor in holder.state.get(key, {}).values()
            if isinstance(tensor, torch.Tensor) and tensor.ndim
        ):
            context.notes.append(
                f"{context.section}: the state dict numbers its parameters; they were taken to be those of the model, "
                "in order"
            )
            return [(key, name, group) for key, name in zip(keys, found, strict=True)]
    raise MismatchError(
        f"section {context.section!r}: the state dict numbers its {sum(len(g['params']) for g in holder.groups)} "
        "parameters, and it is unknown which they are. Load into the optimizer itself, or into "
        "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint; or build the optimizer from "
        "named_parameters()",
        [("value", f"{context.section}.param_groups", "parameters have numbers, and no names")],
    )
