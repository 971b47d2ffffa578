"""Give memory to meta-device tensors of modules without replacing the Python objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from .base import Context
from .dtensor import is_dtensor, with_memory
from .module_tree import Slot


def materialize(slots: Sequence[Slot], context: Context) -> torch.Tensor:
    """Give the meta tensor of these (tied) slots uninitialized memory, and return the tensor that has it.

    The tensor object stays the same, so optimizers and tied names keep referring to it. If torch cannot swap it, a new
    object replaces it in the modules. Raises ``StateError`` if an optimizer of the state refers to the old object.
    ``context.undo`` gets functions that make the tensors meta tensors again.
    """
    filled: torch.Tensor | None = None
    done: dict[int, torch.Tensor] = {}
    for slot in slots:
        old = slot.tensor
        if id(old) in done:
            _put(slot, done[id(old)])
            continue
        made = with_memory(old, context.device) if filled is None else filled.detach()
        filled = made if filled is None else filled
        done[id(old)] = _swap(slot, _same_kind(old, made), context)
        _put(slot, done[id(old)])
    return done[id(slots[0].tensor)]


def _same_kind(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` with the class and the attributes of ``old``, which may be a subclass of Parameter."""
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
        holders = list(_holders(slot.tensor, context.state))
        if holders:
            raise StateError(
                f"{slot.fqn}: giving this meta-device parameter memory would disconnect it from the optimizer in "
                f"{', '.join(holders)} ({error}). Call module.to_empty(device=...) before you build the "
                "optimizer"
            ) from error
        context.undo.append(partial(_put, slot, slot.tensor))
        context.notes.append(
            f"{slot.fqn}: the meta-device tensor was replaced by a new object ({error}); an optimizer built earlier "
            "still refers to the old one"
        )
        return made
    context.undo.append(partial(torch.utils.swap_tensors, slot.tensor, made))
    return slot.tensor


def _put(slot: Slot, tensor: torch.Tensor) -> None:
    held: dict[str, Any] = slot.owner._parameters if slot.is_parameter else slot.owner._buffers
    held[slot.attribute] = tensor


def _holders(tensor: torch.Tensor, state: Mapping[str, Any]) -> Iterator[str]:
    """The sections with an optimizer that updates this parameter."""
    for name, value in state.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            groups = item.param_groups if isinstance(item, torch.optim.Optimizer) else []
            if any(param is tensor for group in groups for param in group["params"]):
                yield repr(name)
