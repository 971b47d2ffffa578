"""Find where optimizers keep their state: behind wrappers, or on one rank of several.

A wrapper is unwrapped only if everything that it adds to the optimizer inside it is known. Any other wrapper is refused
by name, because state that is kept elsewhere would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from .base import Context
from .dtensor import loaded_class
from .module_tree import modules_of

_IN_BACKWARD = "_in_backward_optimizers"
_STANDARD = frozenset({"state", "param_groups"})


@dataclass(eq=False)
class StateHolder:
    """One optimizer as the adapter sees it, without its wrappers.

    ``optimizer`` computes the steps; for a state dict, it is None. ``state`` has an entry for each parameter, and
    ``groups`` determine the next step. ``held`` are the ``id``s of the parameters whose state this rank keeps; None for
    all. ``layers`` are the wrappers and the optimizer, from the outside. ``averager`` belongs to a
    ``PostLocalSGDOptimizer``.
    """

    optimizer: Any
    state: MutableMapping[Any, Any]
    groups: Sequence[MutableMapping[str, Any]]
    held: frozenset[int] | None = None
    layers: tuple[Any, ...] = ()
    averager: Any = None


def is_optimizer(obj: object) -> bool:
    """Whether this is an optimizer, or a wrapper with an optimizer's ``param_groups`` and ``state``."""
    if isinstance(obj, torch.optim.Optimizer):
        return True
    if isinstance(obj, (nn.Module, type)):
        return False
    return isinstance(getattr(obj, "param_groups", None), list) and isinstance(getattr(obj, "state", None), Mapping)


def as_list(obj: Any) -> list[Any]:
    """The optimizers of a section, which is one optimizer or a list of them."""
    return list(obj) if isinstance(obj, (list, tuple)) else [obj]


def holders_of(optimizers: Sequence[Any], context: Context) -> list[StateHolder]:
    """The optimizers without their wrappers. Raises ``StateError`` for a wrapper that cannot be unwrapped safely."""
    holders: list[StateHolder] = []
    for number, optimizer in enumerate(optimizers):
        where = f"section {context.section!r}: " + (f"optimizer {number}, " if len(optimizers) > 1 else "")
        holders.extend(_unwrapped(optimizer, (optimizer,), where))
    return holders


def _unwrapped(optimizer: Any, layers: tuple[Any, ...], where: str) -> list[StateHolder]:
    if isinstance(optimizer, loaded_class("torch.distributed.optim", "ZeroRedundancyOptimizer")):
        return [_zero_holder(optimizer, layers, where)]
    inner = _inner_optimizers(optimizer)
    if not inner:
        return [StateHolder(optimizer, optimizer.state, optimizer.param_groups, layers=layers)]
    parts = list(chain.from_iterable(inner.values()))
    if not _shares_everything(optimizer, parts):
        raise StateError(
            f"{where}{_kind(optimizer)} wraps {', '.join(sorted({_kind(part) for part in parts}))} and has param "
            f"groups or state besides theirs, so it is unknown which of them determine the next step. Pass "
            f"{' and '.join(f'optimizer.{name}' for name in inner)} as the optimizer, and what the wrapper adds as a "
            "separate section"
        )
    holders = [holder for part in parts for holder in _unwrapped(part, (*layers, part), where)]
    averaging: type[Any] | tuple[()] = loaded_class("torch.distributed.optim", "PostLocalSGDOptimizer")
    if isinstance(optimizer, averaging):
        holders[0].averager = optimizer.averager
    return holders


def _zero_holder(optimizer: Any, layers: tuple[Any, ...], where: str) -> StateHolder:
    """ZeRO stage 1 of torch: each rank keeps the complete state of some parameters in an inner optimizer.

    Before each step, it copies the options of the outer groups to the inner ones.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise StateError(
            f"{where}{_kind(optimizer)} with overlap_with_ddp=True keeps its hyper-parameters in a functional "
            "optimizer, which is not supported; use overlap_with_ddp=False"
        )
    held = frozenset(id(param) for group in inner.param_groups for param in group["params"])
    return StateHolder(inner, inner.state, optimizer.param_groups, held, (*layers, inner))


def _inner_optimizers(optimizer: Any) -> dict[str, list[Any]]:
    """The optimizers among the attributes of a wrapper, by the attribute's name."""
    found: dict[str, list[Any]] = {}
    seen = {id(optimizer)}
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        items = list(value.values()) if isinstance(value, dict) else as_list(value)
        if items and all(is_optimizer(item) for item in items):
            found[name] = [item for item in items if id(item) not in seen]
            seen.update(map(id, items))
    return {name: items for name, items in found.items() if items}


def _shares_everything(wrapper: Any, parts: Sequence[Any]) -> bool:
    """Whether the wrapper's groups and state are the very objects of the optimizers inside it."""
    groups = {id(group) for part in parts for group in part.param_groups}
    if {id(group) for group in wrapper.param_groups} != groups:
        return False
    if any(wrapper.state is part.state for part in parts) and len(parts) == 1:
        return True
    return all(any(part.state.get(key) is entry for part in parts) for key, entry in wrapper.state.items() if entry)


def require_complete(holders: Sequence[StateHolder], context: Context) -> None:
    """Raise ``StateError`` if optimizers have state that is not in ``holders``, or that belongs to no param group."""
    for holder in holders:
        params = {id(param) for group in holder.groups for param in group["params"]}
        for key, entries in holder.state.items():
            if isinstance(key, torch.Tensor) and id(key) not in params and _is_filled(entries):
                raise StateError(
                    f"section {context.section!r}: {_kind(holder.optimizer)} has state for a tensor of shape "
                    f"{tuple(key.shape)} that is in none of its param groups; remove the state, or add the parameter"
                )
    parts: dict[int, tuple[Any, list[StateHolder]]] = {}
    for holder in holders:
        for layer in holder.layers:
            parts.setdefault(id(layer), (layer, []))[1].append(holder)
    for layer, inside in parts.values():
        _require_known_state_dict(layer, inside, context)
    _require_in_backward(context)


def _require_known_state_dict(optimizer: Any, parts: Sequence[StateHolder], context: Context) -> None:
    """Compare a ``state_dict`` that a class defines itself with what the holders have."""
    method = getattr(type(optimizer), "state_dict", None)
    # The state_dict of a distributed class of torch has nothing that the holders lack, and may communicate.
    is_distributed = type(optimizer).__module__.startswith("torch.distributed.optim.")
    if method is None or method is torch.optim.Optimizer.state_dict or is_distributed:
        return
    where = f"section {context.section!r}: state_dict() of {_kind(optimizer)}"
    advice = (
        "Pass the optimizer inside it, or its state_dict() as a plain section, which you then load with its "
        "load_state_dict()"
    )
    try:
        found = optimizer.state_dict()
    except Exception as error:
        raise StateError(
            f"{where} raised {type(error).__name__} ({error}), so what it keeps is unknown. {advice}"
        ) from error
    extra = sorted(map(str, found.keys() - _STANDARD))
    if extra:
        raise StateError(f"{where} also has {', '.join(extra)}, which would be lost. {advice}")
    counts = [sum(map(_is_filled, state.values())) for state in (found["state"], *(part.state for part in parts))]
    if counts[0] > sum(counts[1:]):
        raise StateError(
            f"{where} has state of {counts[0]} parameters, but its attribute 'state' has that of {sum(counts[1:])}, so "
            f"it is kept elsewhere. {advice}"
        )


def _is_filled(entry: object) -> bool:
    return not isinstance(entry, Mapping) or bool(entry)


def _require_in_backward(context: Context) -> None:
    """Optimizers that run in the backward pass hang on their parameters; each must be in some section of the state."""
    if "torch.distributed.optim.apply_optimizer_in_backward" not in sys.modules:
        return
    listed = {id(item) for value in context.state.values() for item in as_list(value)}
    for section, value in context.state.items():
        for param in (param for module in modules_of(value) for param in module.parameters()):
            for optimizer in param.__dict__.get(_IN_BACKWARD, ()):
                if id(optimizer) not in listed:
                    raise StateError(
                        f"section {context.section!r}: a parameter of shape {tuple(param.shape)} in {section!r} is "
                        f"updated in the backward pass by a {_kind(optimizer)}, which no section contains. Pass all of "
                        "them in a list, with _get_in_backward_optimizers(model) of torch.distributed.optim"
                    )


def _kind(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"
