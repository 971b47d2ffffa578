"""Giving memory to meta-device tensors of modules, the Python objects staying who they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from .base import Context
from .dtensor import empty_like_dtensor, is_dtensor
from .module_tree import Slot

__all__ = ["materialize"]


def materialize(slots: Sequence[Slot], context: Context) -> torch.Tensor:
    """Give the meta tensor behind these (tied) slots uninitialised memory; returns the tensor that has it.

    The tensor object stays the same, so optimizers and other names keep referring to it. Where torch cannot swap it,
    a new object takes its place in the modules, unless an optimizer of the state holds the old one: ``StateError``.
    ``context.undo`` gets what makes them meta tensors again.
    """
    filled: torch.Tensor | None = None
    done: dict[int, torch.Tensor] = {}
    for slot in slots:
        old = slot.tensor
        if id(old) in done:
            _put(slot, done[id(old)])
            continue
        made = _with_memory(old, context.device) if filled is None else filled.detach()
        filled = made if filled is None else filled
        done[id(old)] = _swap(slot, _alike(old, made), context)
        _put(slot, done[id(old)])
    return done[id(slots[0].tensor)]


def _with_memory(meta: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if is_dtensor(meta):
        return empty_like_dtensor(meta, device=device)
    return torch.empty_like(meta.detach(), device=device or torch.device("cpu"))


def _alike(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` as the same kind of object as ``old``: a (sub)class of Parameter, with its attributes."""
    if isinstance(old, nn.Parameter):
        if is_dtensor(old):
            made = nn.Parameter(made, requires_grad=old.requires_grad)
        else:
            made = torch.Tensor._make_subclass(type(old), made, old.requires_grad)
    elif type(old) is not type(made) and not is_dtensor(old):
        made = torch.Tensor._make_subclass(type(old), made, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made


def _swap(slot: Slot, made: torch.Tensor, context: Context) -> torch.Tensor:
    try:
        torch.utils.swap_tensors(slot.tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        holders = [name for name, optimizer in _optimizers(context.state) if _holds(optimizer, slot.tensor)]
        if holders:
            raise StateError(
                f"{slot.fqn}: cannot give this meta-device parameter memory without losing it from the optimizer in "
                f"{', '.join(map(repr, holders))} ({error}). Call module.to_empty(device=...) first and build the "
                "optimizer after it"
            ) from error
        context.undo.append(partial(_put, slot, slot.tensor))
        context.notes.append(
            f"{slot.fqn}: the meta-device tensor was replaced by a new object ({error}); an optimizer built earlier "
            "does not know it"
        )
        return made
    context.undo.append(partial(torch.utils.swap_tensors, slot.tensor, made))
    return slot.tensor


def _put(slot: Slot, tensor: torch.Tensor) -> None:
    held: dict[str, Any] = slot.owner._parameters if slot.is_parameter else slot.owner._buffers
    held[slot.attribute] = tensor


def _optimizers(state: Mapping[str, Any]) -> Iterable[tuple[str, torch.optim.Optimizer]]:
    for name, value in state.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.optim.Optimizer):
                yield name, item


def _holds(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    return any(param is tensor for group in optimizer.param_groups for param in group["params"])
