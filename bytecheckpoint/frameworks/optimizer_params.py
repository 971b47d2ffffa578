"""Find names and layouts for the parameters of optimizers.

An optimizer numbers its parameters. A checkpoint names them instead, so that groups may be reordered, split or merged.
The names come from the modules in the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..errors import NameCollisionError, StateError
from .base import Context
from .dtensor import dtensor_layout, is_dtensor
from .joined import Joined, divided_layout
from .layout import ParamLayout
from .module_tree import clean_name, modules_of, named_slots
from .optimizer_wrappers import StateHolder


@dataclass(eq=False)
class NamedParam:
    """One parameter of one optimizer, its group, and its names and layout. ``key`` is that of its state.

    ``master`` is the copy that the optimizer steps if the model computes in a lower precision; it has the layout of the
    parameter. ``origins`` maps each name to the section and name of the model's tensor that is computed from it.
    ``entry_layouts`` are the layouts of entries of the state that differ from the parameter's, by key. ``is_divided``:
    the layout has names of parts of the parameter, which were stored one by one. ``names`` are all names in the
    parameter, and ``whole_name`` the one under which each plain tensor of the state is stored whole; None if that
    depends on the tensor.
    """

    param: torch.Tensor
    layout: ParamLayout
    holder: StateHolder
    group: MutableMapping[str, Any]
    key: Any
    master: torch.Tensor | None = None
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    entry_layouts: Mapping[str, ParamLayout] = field(default_factory=dict)
    is_divided: bool = False
    names: tuple[str, ...] = field(init=False)
    whole_name: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(self.layout.fqns)
        depends = self.holder.held is not None or self.entry_layouts or is_dtensor(self.param)
        self.whole_name = None if depends else self.layout.one_whole

    @property
    def local_layout(self) -> ParamLayout:
        """The layout of a plain tensor with the shape of the parameter's local memory."""
        return self.layout if self.is_divided or not is_dtensor(self.param) else self._layout_of_part

    @cached_property
    def _layout_of_part(self) -> ParamLayout:
        return dtensor_layout(self.names[0], self.param)  # type: ignore[arg-type]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The parameter's state, empty if it has none. Do not change it."""
        state: Mapping[Any, Any] = self.holder.state.get(self.key, {})
        return state

    def own_state(self) -> dict[str, Any]:
        """The parameter's state to change, created if it has none."""
        state: dict[str, Any] = self.holder.state.setdefault(self.key, {})
        return state

    @property
    def is_remote(self) -> bool:
        """Whether other ranks hold the state, which this rank then neither saves nor loads.

        ZeRO assigns each parameter to one rank. FSDP-1 never gives an empty piece a gradient, so its state, even its
        step count, falls behind that of other ranks.
        """
        if self.holder.held is not None and id(self.param) not in self.holder.held:
            return True
        if is_dtensor(self.param):
            return False
        return 0 in self.layout.local_shape and any(0 not in shape for shape in self.layout.fqns.values())

    def divided(self, joined: Joined) -> NamedParam:
        """The parameter under the names of its parts, if it is joined."""
        if joined.keys().isdisjoint(self.names):
            return self
        origins: dict[str, tuple[str, str]] = {}
        for fqn, (section, name) in self.origins.items():
            parts = {part.name: (section, part.name) for part in joined.get(fqn, ())}
            origins.update(parts or {fqn: (section, name)})
        entries = {key: divided_layout(layout, joined) for key, layout in self.entry_layouts.items()}
        layout = divided_layout(self.layout, joined)
        return replace(self, layout=layout, origins=origins, entry_layouts=entries, is_divided=True)


def named_params(holders: Sequence[StateHolder], context: Context) -> list[NamedParam]:
    """Every parameter of every optimizer with its names, in the order of the optimizers.

    A name is the fqn in the module that owns the parameter, or ``section.fqn`` if no single section owns all
    parameters. Parameters of no module have the names in their group's ``param_names``. Raises ``StateError`` for a
    parameter without a name or in two groups, and ``NameCollisionError`` for two parameters with the same name.
    """
    slots = list(_slots(holders))
    layouts = {key: owned.layout for key, owned in owned_layouts({id(slot.param) for slot in slots}, context).items()}
    result: list[NamedParam] = []
    seen: dict[int, _Slot] = {}
    taken: dict[str, _Slot] = {}
    unowned: list[NamedParam] = []
    for slot in slots:
        holder, group, param, (_, _, index) = slot
        if seen.setdefault(id(param), slot) is not slot:
            raise StateError(
                f"section {context.section!r}: the same parameter appears twice, as {seen[id(param)]} and as {slot}"
            )
        layout = layouts.get(id(param))
        if layout is None:
            given = group.get("param_names")
            if given is None or len(given) != len(group["params"]) or getattr(param, "_fsdp_flattened", False):
                raise StateError(
                    f"section {context.section!r}: {slot} of shape {tuple(param.shape)} has no name. Add the module "
                    "that owns it to the state (for example as 'model'), or build the optimizer from "
                    "named_parameters(). If it is a wrapper's own copy of a parameter (a master weight, a flat "
                    "buffer), save what the wrapper's state_dict() returns as a plain section instead"
                )
            layout = ParamLayout.whole(clean_name(given[index]), tuple(param.shape))
        for name in layout.fqns:
            if taken.setdefault(name, slot) is not slot:
                raise NameCollisionError(
                    f"section {context.section!r}: {taken[name]} and {slot} are both named {name!r}; pass the modules "
                    "that own them as separate sections of the state"
                )
        result.append(NamedParam(param, layout, holder, group, param))
        if id(param) not in layouts:
            unowned.append(result[-1])
    if unowned:
        _require_no_copies(unowned, context)
    return result


def _require_no_copies(unowned: Sequence[NamedParam], context: Context) -> None:
    """Refuse master weights: parameters with a model's names that no section of the state owns or stores."""
    dtypes = {
        fqn: slot.tensor.dtype
        for value in context.state.values()
        for slot in named_slots(modules_of(value))
        if slot.is_parameter
        for fqn in (slot.fqn,)
    }
    for named in unowned:
        model = dtypes.get(named.names[0], named.param.dtype)
        if model != named.param.dtype:
            raise StateError(
                f"section {context.section!r}: the optimizer updates a {named.param.dtype} copy of {named.names[0]}, "
                f"which is {model} in the model. The copy would not be stored. Save what the wrapper's state_dict() "
                "returns as a plain section instead, or add the copies to the state as a separate section"
            )


def _qualified(section: str, fqn: str) -> str:
    return f"{section}.{fqn}"


class _Slot(NamedTuple):
    """A parameter in a group. ``at`` are the numbers of the optimizer, the group, and the parameter in it."""

    holder: StateHolder
    group: MutableMapping[str, Any]
    param: torch.Tensor
    at: tuple[int, int, int]

    def __str__(self) -> str:
        return "optimizer {}, group {}, parameter {}".format(*self.at)


def _slots(holders: Sequence[StateHolder]) -> Iterator[_Slot]:
    for number, holder in enumerate(holders):
        for group_number, group in enumerate(holder.groups):
            for index, param in enumerate(group["params"]):
                yield _Slot(holder, group, param, (number, group_number, index))


class OwnedLayout(NamedTuple):
    """The layout of a parameter under its final names, and the section of the model that owns it."""

    layout: ParamLayout
    section: str
    is_qualified: bool = False

    @property
    def origins(self) -> dict[str, tuple[str, str]]:
        """For each name, the section and name of the model's tensor."""
        skipped = len(self.section) + 1 if self.is_qualified else 0
        return {name: (self.section, name[skipped:]) for name in self.layout.fqns}


def owned_layouts(params: set[int], context: Context) -> Mapping[int, OwnedLayout]:
    """Layouts of those parameters that a model of the state owns, by ``id``.

    The names are qualified with the section if no single section owns all of them.
    """
    owners = {name: context.layouts_of(value) for name, value in context.state.items() if modules_of(value)}
    owned = params.intersection(chain.from_iterable(owners.values()))
    found: dict[int, OwnedLayout] = {}
    for section, layouts in owners.items():
        if owned <= layouts.keys():
            return {key: OwnedLayout(layouts[key], section) for key in owned}
        for key in owned & layouts.keys() - found.keys():
            found[key] = OwnedLayout(layouts[key].renamed(partial(_qualified, section)), section, is_qualified=True)
    return found
