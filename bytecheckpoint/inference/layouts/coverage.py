"""Whether every element of a model's parameters gets something when its loader runs, not only every parameter.

A loader of an engine does not notice that one of the tensors that it fuses into a parameter is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import Copy, storage_identity

__all__ = ["OwnWrites", "uncovered"]

_View = tuple[int, tuple[int, ...], tuple[int, ...]]


class OwnWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a loader writes that is no recorded tensor: padding that it fills, values that it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = func._schema.arguments[:1]
        writes = args and first and first[0].alias_info is not None and first[0].alias_info.is_write
        # A copy from a recorded tensor is noted by its recorder.
        if writes and not (func is torch.ops.aten.copy_.default and hasattr(args[1], "recorder")):
            self.targets.append(args[0].detach())
        return func(*args, **(kwargs or {}))


def uncovered(
    parameters: Iterable[tuple[str, torch.Tensor]], copies: Iterable[Copy], own: Iterable[torch.Tensor]
) -> list[tuple[str, str]]:
    """``(name, range)`` of the first elements that get nothing, of each parameter that has such elements."""
    views: dict[int, set[_View]] = {}
    for target in [*(copy.target for copy in copies), *own]:
        views.setdefault(storage_identity(target), set()).add(_view(target))
    found = []
    for name, parameter in parameters:
        # What its maker says is padding is nobody's to fill.
        wanted = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
        touched = views.get(storage_identity(parameter), set())
        if sum(int(np.prod(shape)) for _, shape, _ in touched) < wanted:
            found.append((name, _first_hole(parameter, touched)))
    return found


def _first_hole(parameter: torch.Tensor, views: Iterable[_View]) -> str:
    begin = int(parameter.storage_offset())
    mask = torch.zeros(int(parameter.untyped_storage().nbytes()) // parameter.itemsize, dtype=torch.bool)
    for offset, shape, strides in views:
        mask.as_strided(shape, strides, offset).fill_(True)
    own = mask.as_strided(tuple(parameter.shape), tuple(parameter.stride()), begin).numpy()
    first = np.unravel_index(int(np.argmin(own)), own.shape)
    return f"{int(own.size - own.sum()):,} of {own.size:,} elements, from {[int(index) for index in first]} on"


def _view(tensor: torch.Tensor) -> _View:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
