"""Find names and layouts for the parameters of optimizers.

An optimizer numbers its parameters. A checkpoint names them instead, so that groups may be reordered, split or merged.
The names come from the modules in the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    names: tuple[str, ...] = field(init=False)
    _local: ParamLayout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.names = tuple(self.layout.fqns)

    @property
    def local_layout(self) -> ParamLayout:
        """The layout of a plain tensor with the shape of the parameter's local memory."""
        if self._local is None:
            self._local = dtensor_layout(self.names[0], self.param) if is_dtensor(self.param) else self.layout
        return self._local

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
    owners = _owners(context)
    chosen = _common_section(slots, owners)
    result: list[NamedParam] = []
    seen: dict[int, str] = {}
    taken: dict[str, str] = {}
    for where, optimizer, group, index, param in slots:
        if id(param) in seen:
            raise StateError(
                f"section {context.section!r}: the same parameter appears twice, as {seen[id(param)]} and as {where}"
            )
        seen[id(param)] = where
        layout = _layout(where, group, index, param, owners, chosen, context)
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


def _owners(context: Context) -> dict[str, Mapping[int, ParamLayout]]:
    """Layouts of the parameters of every section that is a model, by ``id`` of the parameter."""
    owners: dict[str, Mapping[int, ParamLayout]] = {}
    for section, value in context.state.items():
        if modules_of(value):
            owners[section] = context.layouts_of(value)
    return owners


def _common_section(
    slots: Sequence[tuple[str, Any, dict[str, Any], int, torch.Tensor]], owners: Mapping[str, Mapping[int, ParamLayout]]
) -> str | None:
    owned = {id(param) for *_, param in slots if any(id(param) in layouts for layouts in owners.values())}
    return next((section for section, layouts in owners.items() if owned and owned <= layouts.keys()), None)


def _layout(
    where: str,
    group: Mapping[str, Any],
    index: int,
    param: torch.Tensor,
    owners: Mapping[str, Mapping[int, ParamLayout]],
    chosen: str | None,
    context: Context,
) -> ParamLayout:
    if chosen is not None and id(param) in owners[chosen]:
        return owners[chosen][id(param)]
    for section, layouts in owners.items():
        if id(param) in layouts:
            return layouts[id(param)].renamed(partial(_qualified, section))
    given = group.get("param_names")
    if given is None or len(given) != len(group["params"]) or getattr(param, "_fsdp_flattened", False):
        raise StateError(
            f"section {context.section!r}: {where} of shape {tuple(param.shape)} has no name. Add the module that "
            "owns it to the state (for example as 'model'), or build the optimizer from named_parameters()"
        )
    return ParamLayout.whole(clean_name(given[index]), tuple(param.shape))
