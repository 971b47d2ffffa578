"""The adapter for optimizers, which stores state and hyper-parameters by parameter name, never by position.

Tensors of the state are stored as ``state.<fqn>.<key>``, plain values under ``("state", fqn, key)``, and the
hyper-parameters of the parameter's group under ``("param_groups", fqn)``. A parameter without state has an empty dict
under ``("state", fqn)``. Saving runs no step, creates no state and changes no learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from ..errors import MismatchError, UnserializableError, UnsupportedTensorError
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .optimizer_params import NamedParam, is_optimizer, named_params
from .optimizer_state import StoredState, capture_state, group_path, state_name
from .optimizer_target import StateFiller

__all__ = ["OptimizerAdapter"]

_IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation of the step but not its result. A load keeps the target's."""

_NOT_OPTIONS = frozenset({"params", "param_names"})

_GroupParams = tuple["dict[str, Any]", "list[str]"]
"""A group and the names of its parameters."""


class OptimizerAdapter(Adapter):
    """``torch.optim.Optimizer``, any object with ``param_groups`` and ``state``, or a list of them.

    A list is one union of parameters, whose distribution over optimizers and groups may change between save and load.
    A load keeps the target's ``foreach``, ``fused``, ``capturable`` and ``differentiable``. State of a sharded
    parameter must have the parameter's shape, be 0-d, or be a DTensor; other state raises ``UnsupportedTensorError``.
    """

    name: ClassVar[str] = "optimizer"
    priority: ClassVar[int] = 10

    def recognizes(self, obj: object) -> bool:
        if isinstance(obj, (list, tuple)):
            return bool(obj) and all(is_optimizer(item) for item in obj)
        return is_optimizer(obj)

    def capture(self, obj: Any, context: Context) -> SectionSource:
        optimizers = _as_list(obj)
        params = named_params(optimizers, context)
        source = SectionSource()
        for named in params:
            state = named.optimizer.state.get(named.param, {})
            capture_state(named, state, source, compare=context.world_size > 1)
        for group, names in _groups_of(params):
            options = _options_of(group, f"{context.section}.param_groups")
            source.values.update({group_path(name): options for name in names})
        source.values.update(_shared_values(optimizers))
        source.values.update(_orders(params))
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        optimizers = _as_list(obj)
        params = named_params(optimizers, context)
        names = {name for named in params for name in named.names}
        state = StoredState(stored, params)
        _require_common_names(params, state, context)
        orders = _orders(params)
        _require_same_orders(orders, stored)
        groups = _groups_of(params)
        _agreed_options(groups, stored.values)

        target = SectionTarget()
        filler = StateFiller(target, state, context.device)
        for named in params:
            filler.add(named)
        paths = {group_path(name) for name in names}
        target.requested_values |= paths
        target.optional |= {path for path in paths if path not in stored.values}
        for name in state.keys() - names:
            target.ignorable.update((state_name(name, key) for key in state[name].tensors), state[name].paths)
        shared = [path for path in stored.values if path[0] == "shared"]
        target.requested_values.update(shared)
        target.requested_values.update(orders)
        target.optional.update(orders)
        target.ignorable.update(path for path in stored.values if path[0] == "order")

        def apply(values: Mapping[Path, Any]) -> None:
            chosen = _agreed_options(groups, values)
            filler.finish(values)
            for group, options in chosen:
                _set_options(group, options)
            for path in shared:
                if path in values:
                    optimizers[int(path[1])].state[path[2]] = values[path]

        target.apply = apply
        return target


def _as_list(obj: Any) -> list[Any]:
    return list(obj) if isinstance(obj, (list, tuple)) else [obj]


def _shared_values(optimizers: Iterable[Any]) -> dict[Path, Any]:
    """State that belongs to no parameter, which some optimizers store under a string key."""
    values: dict[Path, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for key, value in optimizer.state.items():
            if isinstance(key, torch.Tensor):
                continue
            if not isinstance(key, str) or isinstance(value, torch.Tensor):
                raise UnserializableError(
                    f"optimizer {number}: state {key!r} of type {type(value).__name__} belongs to no parameter "
                    "and is not a plain value with a string key"
                )
            values["shared", number, key] = value
    return values


def _orders(params: Iterable[NamedParam]) -> dict[Path, list[str]]:
    """The order of each LBFGS's parameters, under its first name: its state is one vector over all of them."""
    orders: dict[int, list[str]] = {}
    for named in params:
        if isinstance(named.optimizer, torch.optim.LBFGS):
            orders.setdefault(id(named.optimizer), []).extend(named.names)
    return {("order", names[0]): names for names in orders.values()}


def _require_same_orders(orders: Mapping[Path, list[str]], stored: StoredSection) -> None:
    faults = [
        ("value", str(path[1]), f"saved with the parameters {stored.values[path]}, now {names}")
        for path, names in orders.items()
        if path in stored.values and stored.values[path] != names
    ]
    if faults:
        raise MismatchError(
            "LBFGS stores one state for all of its parameters in their order, and this order has changed: "
            + "; ".join(detail for *_, detail in faults),
            faults,
        )


def _require_common_names(params: list[NamedParam], state: StoredState, context: Context) -> None:
    ours = sorted(name for named in params for name in named.names)
    theirs = sorted(state)
    if not params or not any(one.keys for one in state.values()) or not state.keys().isdisjoint(ours):
        return
    raise MismatchError(
        f"section {context.section!r}: the checkpoint has no state for any of the optimizer's {len(ours)} "
        f"parameters, so the names differ. In memory: {', '.join(ours[:5])}; stored: {', '.join(theirs[:5])}. "
        "Pass rename=, or leave the optimizer out of the load",
        [("missing", name, "no stored optimizer state of this name") for name in ours],
    )


def _groups_of(params: Iterable[NamedParam]) -> list[_GroupParams]:
    """The groups that have parameters, each with the names of all of them."""
    groups: dict[int, _GroupParams] = {}
    for named in params:
        groups.setdefault(id(named.group), (named.group, []))[1].extend(named.names)
    return list(groups.values())


def _options_of(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The hyper-parameters as plain values. A one-element tensor (a learning rate on a device) becomes a number."""
    return {key: _plain(value, f"{where}.{key}") for key, value in group.items() if key not in _NOT_OPTIONS}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UnsupportedTensorError(f"{where}: a hyper-parameter of shape {tuple(value.shape)} is not one number")
        return value.item()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(item, where) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    return value


def _agreed_options(groups: Iterable[_GroupParams], values: Mapping[Path, Any]) -> list[tuple[dict[str, Any], Any]]:
    """For each target group, the stored hyper-parameters of its parameters. Groups that are not stored are left out.

    Raises ``MismatchError`` (kind ``value``) if the parameters of one target group were stored with different
    hyper-parameters, since no choice between them would be right.
    """
    result: list[tuple[dict[str, Any], Any]] = []
    faults: list[tuple[str, str, str]] = []
    for group, names in groups:
        stored = {name: values[path] for name in names if (path := group_path(name)) in values}
        if not stored:
            continue
        first, options = next(iter(stored.items()))
        common = _without_flags(options)
        for name, other in stored.items():
            if other == options:
                continue
            others = _without_flags(other)
            differing = sorted(k for k in common.keys() | others.keys() if common.get(k) != others.get(k))
            faults.extend(
                ("value", name, f"{key} = {others.get(key)!r}, but {first} has {common.get(key)!r}")
                for key in differing
            )
        result.append((group, common))
    if faults:
        lines = "\n".join(f"  {name}: {detail}" for _, name, detail in faults)
        raise MismatchError(
            "parameters of one param group were saved with different hyper-parameters; split the group as it was "
            f"saved, or exclude 'param_groups' from the load and set them yourself:\n{lines}",
            faults,
        )
    return result


def _without_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key not in _IMPLEMENTATION_FLAGS | _NOT_OPTIONS}


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the hyper-parameters of a group. Existing tensors keep their identity, device and dtype."""
    for key, value in options.items():
        group[key] = _like(group.get(key), value)


def _like(existing: Any, value: Any) -> Any:
    if isinstance(existing, torch.Tensor) and isinstance(value, (int, float)):
        with torch.no_grad():
            return existing.fill_(value)
    if type(existing) in (list, tuple) and isinstance(value, (list, tuple)):
        padded = (*existing, *(None for _ in value[len(existing) :]))
        return type(existing)(_like(old, new) for old, new in zip(padded, value))
    return value
