"""The adapter for optimizers, which stores state and hyper-parameters by parameter name, never by position.

Tensors of the state are stored as ``state.<fqn>.<key>``, plain values under ``("state", fqn, key)``, the
hyper-parameters of the parameter's group under ``("param_groups", fqn)``, and the class of the optimizer under
``("class", fqn)``. A parameter without state has an empty dict under ``("state", fqn)``. Saving runs no step, creates
no state and changes no learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import MismatchError, StateError, UnserializableError
from ..runtime.messages import listed
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .joined import find_joined
from .module_tree import modules_of
from .optimizer_class import class_path, lineage_of, require_same_class
from .optimizer_groups import agreed_options, empty_groups, group_path, groups_of, options_of, set_options
from .optimizer_params import NamedParam, named_params
from .optimizer_state import MASTERS_OF, StoredState, capture_states, state_name
from .optimizer_target import StateFiller
from .optimizer_wrappers import StateHolder, as_list, holders_of, is_optimizer, require_complete
from .scaled_state import converts_state
from .stored_state_dict import StoredStateDict, is_stored_state_dict

LOSS_SCALER = "loss_scaler"
"""The state of a dynamic loss scaler has the path ``(LOSS_SCALER, number)``; most optimizers have none."""

NAMELESS: Path = ("nameless",)
"""The path of a text: what another system stored that does not name parameters. Only its own optimizers know them."""

_IGNORABLE = frozenset({"order", "empty_groups", LOSS_SCALER, *MASTERS_OF})


class OptimizerAdapter(Adapter):
    """``torch.optim.Optimizer``, any object with ``param_groups`` and ``state``, or a list of them.

    A list is one union of parameters, whose distribution over optimizers and groups may change between save and load.
    A load keeps the target's ``foreach``, ``fused``, ``capturable`` and ``differentiable``. State of a sharded
    parameter must have the parameter's shape, be 0-d, or be a DTensor; other state raises ``UnsupportedTensorError``.

    Wrappers are unwrapped. One with separate groups, state or entries of ``state_dict()`` raises ``StateError``.
    ``ZeroRedundancyOptimizer`` is one global optimizer, whose state loads into any other layout, and the other way
    round. State that another class of optimizer saved raises ``MismatchError``.
    """

    name: ClassVar[str] = "optimizer"
    kind: ClassVar[str] = "optimizer"
    priority: ClassVar[int] = 10

    def recognizes(self, obj: object) -> bool:
        if isinstance(obj, (list, tuple)):
            return bool(obj) and all(is_optimizer(item) for item in obj)
        return is_optimizer(obj)

    def describe(self, obj: Any, context: Context) -> tuple[Sequence[StateHolder], list[NamedParam]]:
        """Find the optimizers that compute the steps, and the names and layouts of their parameters.

        A subclass overrides this for optimizers that step flat or partitioned copies of a model's parameters. Their
        layouts come from the optimizer's own structures.

        Args:
            obj: An object that ``recognizes`` accepts.
            context: The call that the object is part of.

        Returns:
            The optimizers, and every parameter that they step on this rank.

        Raises:
            StateError: A wrapper keeps state elsewhere, or a parameter has no name.
        """
        holders = holders_of(as_list(obj), context)
        for holder in holders:
            _refuse_scaled_state(holder, context)
        # First, because a wrapper that replaces parameters may communicate in its state_dict().
        params = named_params(holders, context)
        require_complete(holders, context)
        return holders, params

    def per_rank_policies(self, obj: Any) -> dict[Path, str]:
        return {MASTERS_OF: "skip"}  # it describes the saved run, and changes nothing in an optimizer

    def capture(self, obj: Any, context: Context) -> SectionSource:
        return capture_by_name(*self.describe(obj, context), context)

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        holders, params = self.describe(obj, context)
        return fill_by_name(holders, _divided(params, context, stored), context, stored)


def _divided(params: list[NamedParam], context: Context, stored: StoredSection) -> list[NamedParam]:
    """The parameters, those with the names of their parts that transformers joins and of which only parts are stored.

    Only names count: the numbers of a state dict do not show which parts they are.
    """
    shapes = {fqn: shape for named in params for fqn, shape in named.layout.fqns.items()}
    if all(group_path(fqn) in stored.values for fqn in shapes):
        return params
    known = {str(path[1]) for path in stored.values if len(path) > 1}
    known |= {name.partition(".")[2].rpartition(".")[0] for name in stored.metas}
    lacking = {fqn: shape for fqn, shape in shapes.items() if fqn not in known}
    modules = [module for value in context.state.values() for module in modules_of(value)]
    joined = find_joined(modules, lacking, known - shapes.keys(), context)
    return [named.divided(joined) for named in params]


def capture_by_name(holders: Sequence[StateHolder], params: list[NamedParam], context: Context) -> SectionSource:
    """Describe the state and the hyper-parameters of these parameters."""
    source = SectionSource()
    if context.trainable_only:
        params = _leave_out_frozen(params, source)
    capture_states(params, source, compare=context.world_size > 1)
    where = f"{context.section}.param_groups"
    for group, names in groups_of(params):
        options = options_of(group, where)
        source.values.update({group_path(name): options for name in names})
    source.values.update({path: options_of(group, where) for path, group in empty_groups(holders)})
    lineages = {id(holder): lineage_of(holder.optimizer) for holder in holders}
    source.values.update({class_path(name): lineages[id(n.holder)] for n in params for name in n.names})
    source.values.update(_shared_values(holders))
    source.values.update({path: averager.step for path, averager in _averagers(holders).items()})
    source.values.update(_orders(params))
    source.values.update(_owner_of_masters(params))
    return source


def _leave_out_frozen(params: list[NamedParam], source: SectionSource) -> list[NamedParam]:
    """List the state of frozen parameters in ``source.left_out``; return the other parameters.

    LBFGS has one state for all parameters, which is stored with the first one, even if that is frozen.
    """
    kept: list[NamedParam] = []
    for named in params:
        is_trained = named.param.requires_grad or named.master is not None
        if is_trained or isinstance(named.holder.optimizer, torch.optim.LBFGS):
            kept.append(named)
            continue
        frozen = SectionSource()
        capture_states([named], frozen, compare=False)
        source.left_out.update((name,) for name in frozen.metas)
        source.left_out.update(frozen.values)
        source.left_out.update(path(name) for name in named.names for path in (group_path, class_path))
    return kept


def fill_by_name(
    holders: Sequence[StateHolder], params: list[NamedParam], context: Context, stored: StoredSection
) -> SectionTarget:
    """Describe where a stored optimizer, or its state dict, goes. Raises ``MismatchError`` if it cannot fit."""
    if (found := stored.values.get(NAMELESS)) is not None:
        raise MismatchError(f"section {context.section!r}: {found}", [("value", context.section, str(found))])
    if not is_stored_state_dict(stored.values):
        return _fill(holders, params, context, stored)
    state_dict = StoredStateDict(stored, params, context)
    return state_dict.restored(_fill(holders, params, context, state_dict.section))


def _fill(
    holders: Sequence[StateHolder], params: list[NamedParam], context: Context, stored: StoredSection
) -> SectionTarget:
    names = {name for named in params for name in named.names}
    state = StoredState(stored, params)
    _require_common_names(params, state, context)
    require_same_class(params, stored.values, context)
    orders = _orders(params)
    _require_same_orders(orders, stored)
    groups, empty = groups_of(params), list(empty_groups(holders))
    agreed_options(groups, empty, stored.values)  # to find faults

    target = SectionTarget()
    filler = StateFiller(target, state, context.device)
    for named in params:
        filler.add(named)
    filler.add_found()
    if filler.unknown and state:
        context.notes.append(
            f"{context.section}: the saved optimizer did not have these parameters, perhaps because they were tied to "
            f"others, so their state stays as it is: {listed(filler.unknown)}"
        )
    paths = {*map(group_path, names), *(path for path, _ in empty)}
    target.requested_values |= paths
    target.requested_values.update(path for name in names if (path := class_path(name)) in stored.values)
    target.optional |= {path for path in paths if path not in stored.values}
    for name in state.keys() - names:
        target.ignorable.update((state_name(name, key) for key in state[name].tensors), state[name].paths)
    shared = [path for path in stored.values if path[:1] == ("shared",) and int(path[1]) < len(holders)]
    averagers = _averagers(holders)
    target.requested_values.update(shared, averagers, orders)
    target.optional.update(orders)
    target.ignorable.update(path for path in stored.values if path[:1] and path[0] in _IGNORABLE)
    if any(named.master is not None for named in params):
        target.requested_values.add(MASTERS_OF)
        target.optional.add(MASTERS_OF)

    def apply(values: Mapping[Path, Any]) -> None:
        options = agreed_options(groups, empty, values)
        filler.finish(values)
        set_options(options)
        for path in shared:
            if path in values:
                holders[int(path[1])].state[path[2]] = values[path]
        for path, averager in averagers.items():
            if path in values:
                averager.step = values[path]

    target.apply = apply
    return target


def _refuse_scaled_state(holder: StateHolder, context: Context) -> None:
    """Refuse state that has a meaning only with scales that the optimizer keeps elsewhere (Transformer Engine)."""
    if not converts_state(holder.optimizer):
        return
    kept = [value for entries in holder.state.values() for value in entries.values() if isinstance(value, torch.Tensor)]
    if any(value.ndim and value.dtype != torch.float32 for value in kept):
        raise StateError(
            f"section {context.section!r}: {type(holder.optimizer).__name__} keeps its state scaled or as remainders, "
            f"which is supported only inside Megatron-core's optimizers; keep the state in float32"
        )


def _shared_values(holders: Iterable[StateHolder]) -> dict[Path, Any]:
    """State that belongs to no parameter, which some optimizers store under a string key."""
    values: dict[Path, Any] = {}
    for number, holder in enumerate(holders):
        for key, value in holder.state.items():
            if isinstance(key, torch.Tensor):
                continue
            if not isinstance(key, str) or isinstance(value, torch.Tensor):
                raise UnserializableError(
                    f"optimizer {number}: state {key!r} of type {type(value).__name__} belongs to no parameter "
                    "and is not a plain value with a string key"
                )
            values["shared", number, key] = value
    return values


def _averagers(holders: Iterable[StateHolder]) -> dict[Path, Any]:
    """The model averagers of wrappers by the path of their step."""
    return {
        ("averager_step", number): holder.averager
        for number, holder in enumerate(holders)
        if holder.averager is not None
    }


def _orders(params: Iterable[NamedParam]) -> dict[Path, list[str]]:
    """The order of each LBFGS's parameters, under its first name: its state is one vector over all of them."""
    orders: dict[int, list[str]] = {}
    for named in params:
        if isinstance(named.holder.optimizer, torch.optim.LBFGS):
            orders.setdefault(id(named.holder), []).extend(named.names)
    return {("order", names[0]): names for names in orders.values()}


def _owner_of_masters(params: Iterable[NamedParam]) -> dict[Path, str]:
    """Which section's tensors are computed from the master weights: other sections may have the same names."""
    for named in params:
        if named.master is not None:
            for name, (section, fqn) in named.origins.items():
                return {MASTERS_OF: section if name == fqn else ""}  # the same for all (``owned_layouts``)
    return {}


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
        f"parameters, so the names differ. In memory: {listed(ours)}; stored: {listed(theirs)}. "
        "Pass rename=, or leave the optimizer out of the load",
        [("missing", name, "no stored optimizer state of this name") for name in ours],
    )
