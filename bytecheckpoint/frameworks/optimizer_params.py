"""Find names and layouts for the parameters of optimizers.

An optimizer numbers its parameters. A checkpoint names them instead, so that groups may be reordered, split or merged.
The names come from the modules in the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import NameCollisionError, StateError
from .base import Context
from .dtensor import dtensor_layout, is_dtensor
from .layout import ParamLayout
from .module_tree import clean_name, modules_of

__all__ = ["NamedParam", "is_optimizer", "named_params"]


@dataclass(eq=False)
class NamedParam:
    """One parameter of one optimizer, its group, and its names and layout."""

    param: torch.Tensor
    layout: ParamLayout
    optimizer: Any
    group: dict[str, Any]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name in the parameter."""
        return tuple(self.layout.fqns)

    @cached_property
    def local_layout(self) -> ParamLayout:
        """The layout of a plain tensor with the shape of the parameter's local memory."""
        return dtensor_layout(self.names[0], self.param) if is_dtensor(self.param) else self.layout

    @property
    def is_remote(self) -> bool:
        """Whether other ranks hold all elements. FSDP-1 never gives such an empty piece a gradient, so its state, even
        its step count, falls behind that of other ranks, and is neither saved nor loaded."""
        if is_dtensor(self.param):
            return False
        return 0 in self.layout.local_shape and any(0 not in shape for shape in self.layout.fqns.values())


def is_optimizer(obj: object) -> bool:
    """Whether this is an optimizer, or a wrapper with an optimizer's ``param_groups`` and ``state``."""
    if isinstance(obj, torch.optim.Optimizer):
        return True
    if isinstance(obj, (nn.Module, type)):
        return False
    return isinstance(getattr(obj, "param_groups", None), list) and isinstance(getattr(obj, "state", None), Mapping)


def named_params(optimizers: Sequence[Any], context: Context) -> list[NamedParam]:
    """Every parameter of every optimizer with its names, in the order of the optimizers.

    A name is the fqn in the module that owns the parameter, or ``section.fqn`` if no single section owns all
    parameters. Parameters of no module have the names in their group's ``param_names``. Raises ``StateError`` for a
    parameter without a name or in two groups, and ``NameCollisionError`` for two parameters with the same name.
    """
    slots = list(_slots(optimizers))
    layouts = _owned_layouts({id(param) for *_, param in slots}, context)
    result: list[NamedParam] = []
    seen: dict[int, str] = {}
    taken: dict[str, str] = {}
    for where, optimizer, group, index, param in slots:
        if id(param) in seen:
            raise StateError(
                f"section {context.section!r}: the same parameter appears twice, as {seen[id(param)]} and as {where}"
            )
        seen[id(param)] = where
        layout = layouts.get(id(param))
        if layout is None:
            given = group.get("param_names")
            if given is None or len(given) != len(group["params"]) or getattr(param, "_fsdp_flattened", False):
                raise StateError(
                    f"section {context.section!r}: {where} of shape {tuple(param.shape)} has no name. Add the module "
                    "that owns it to the state (for example as 'model'), or build the optimizer from "
                    "named_parameters()"
                )
            layout = ParamLayout.whole(clean_name(given[index]), tuple(param.shape))
        for name in layout.fqns:
            if name in taken:
                raise NameCollisionError(
                    f"section {context.section!r}: {taken[name]} and {where} are both named {name!r}; pass the modules "
                    "that own them as separate sections of the state"
                )
            taken[name] = where
        result.append(NamedParam(param, layout, optimizer, group))
    return result


def _qualified(section: str, fqn: str) -> str:
    return f"{section}.{fqn}"


def _slots(optimizers: Sequence[Any]) -> Iterator[tuple[str, Any, dict[str, Any], int, torch.Tensor]]:
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer {number}, " if len(optimizers) > 1 else ""
        for group_number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                yield f"{prefix}group {group_number}, parameter {index}", optimizer, group, index, param


def _owned_layouts(params: set[int], context: Context) -> Mapping[int, ParamLayout]:
    """Layouts of those parameters that a model of the state owns, with their final names, by ``id``."""
    owners = {name: context.layouts_of(value) for name, value in context.state.items() if modules_of(value)}
    owned = params.intersection(chain.from_iterable(owners.values()))
    found: dict[int, ParamLayout] = {}
    for section, layouts in owners.items():
        if owned <= layouts.keys():
            return layouts
        own = owned & layouts.keys() - found.keys()
        found.update({key: layouts[key].renamed(partial(_qualified, section)) for key in own})
    return found
