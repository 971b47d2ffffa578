"""The adapter for optimizers, which stores state and hyper-parameters by parameter name, never by position.

Tensors of the state are stored as ``state.<fqn>.<key>``, plain values under ``("state", fqn, key)``, and the
hyper-parameters of the parameter's group under ``("param_groups", fqn)``. A parameter without state has an empty dict
under ``("state", fqn)``. Saving runs no step, creates no state and changes no learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from ..errors import MismatchError, UnserializableError
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .optimizer_groups import agreed_options, group_path, groups_of, options_of, set_options
from .optimizer_params import NamedParam, is_optimizer, named_params
from .optimizer_state import StoredState, capture_state, expected_keys
from .optimizer_target import StateFiller

__all__ = ["OptimizerAdapter"]


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
        for group, names in groups_of(params):
            options = options_of(group, f"{context.section}.param_groups")
            source.values.update({group_path(name): options for name in names})
        source.values.update(_shared_values(optimizers))
        source.values.update(_orders(params))
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        optimizers = _as_list(obj)
        params = named_params(optimizers, context)
        names = {name for named in params for name in named.names}
        state = StoredState.of(stored, names)
        _require_common_names(params, state, context)
        orders = _orders(params)
        _require_same_orders(orders, stored)
        groups = groups_of(params)
        agreed_options(groups, stored.values)

        target = SectionTarget()
        filler = StateFiller(target, state, context.device)
        expected = expected_keys(params, state)
        for named in params:
            filler.add(named, expected)
        paths = {group_path(name) for name in names}
        target.requested_values |= paths
        target.optional |= {path for path in paths if path not in stored.values}
        for name in state.all_names() - names:
            target.ignorable.update(state.names_of(name))
        shared = [path for path in stored.values if path[0] == "shared"]
        target.requested_values.update(shared)
        target.requested_values.update(orders)
        target.optional.update(orders)
        target.ignorable.update(path for path in stored.values if path[0] == "order")

        def apply(values: Mapping[Path, Any]) -> None:
            chosen = agreed_options(groups, values)
            filler.finish(values)
            for group, options in chosen:
                set_options(group, options)
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
    if not params or state.is_empty or any(state.has(name) for named in params for name in named.names):
        return
    ours = sorted(name for named in params for name in named.names)
    theirs = sorted(state.all_names())
    raise MismatchError(
        f"section {context.section!r}: the checkpoint has no state for any of the optimizer's {len(ours)} "
        f"parameters, so the names differ. In memory: {', '.join(ours[:5])}; stored: {', '.join(theirs[:5])}. "
        "Pass rename=, or leave the optimizer out of the load",
        [("missing", name, "no stored optimizer state of this name") for name in ours],
    )
