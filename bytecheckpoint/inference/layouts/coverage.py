"""Find elements of a model's parameters that its loader leaves unwritten.

An engine's loader does not notice if one of the tensors that it fuses into a parameter is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import Copy, storage_identity

__all__ = ["UnrecordedWrites", "uncovered"]

_View = tuple[int, tuple[int, ...], tuple[int, ...]]


class UnrecordedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects a loader's writes that are not copies of recorded tensors: filled padding, computed values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = func._schema.arguments[:1]
        writes = args and first and first[0].alias_info is not None and first[0].alias_info.is_write
        # The recorder notes copies of recorded tensors.
        if writes and not (func is torch.ops.aten.copy_.default and hasattr(args[1], "recorder")):
            self.targets.append(args[0].detach())
        return func(*args, **(kwargs or {}))


def uncovered(
    parameters: Iterable[tuple[str, torch.Tensor]], copies: Iterable[Copy], unrecorded: Iterable[torch.Tensor]
) -> list[tuple[str, str]]:
    """``(name, description of the first hole)`` for each parameter with elements that nothing is written to."""
    views: dict[int, set[_View]] = {}
    for target in [*(copy.target for copy in copies), *unrecorded]:
        views.setdefault(storage_identity(target), set()).add(_view(target))
    found = []
    for name, parameter in parameters:
        # vLLM marks parameters with padding that no loader fills.
        expected = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
        touched = views.get(storage_identity(parameter), set())
        if sum(int(np.prod(shape)) for _, shape, _ in touched) < expected:
            found.append((name, _first_hole(parameter, touched)))
    return found


def _first_hole(parameter: torch.Tensor, views: Iterable[_View]) -> str:
    begin = int(parameter.storage_offset())
    mask = torch.zeros(int(parameter.untyped_storage().nbytes()) // parameter.itemsize, dtype=torch.bool)
    for offset, shape, strides in views:
        mask.as_strided(shape, strides, offset).fill_(True)
    written = mask.as_strided(tuple(parameter.shape), tuple(parameter.stride()), begin).numpy()
    first = np.unravel_index(int(np.argmin(written)), written.shape)
    return (
        f"{int(written.size - written.sum()):,} of {written.size:,} elements, from {[int(index) for index in first]} on"
    )


def _view(tensor: torch.Tensor) -> _View:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
