"""What changes parameters and optimizer state, held up: the steps of optimizers, and loads into them and the modules.

Registered with torch's own hooks on the objects of one state, and taken off again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

from .dtensor import is_dtensor, local_tensor
from .module_tree import modules_of

__all__ = ["StepHooks"]


class StepHooks:
    """The optimizers of a state (``torch.optim.Optimizer``, and lists of them), the tensors that change in their steps
    alone, and hooks in front of everything that is meant to change these."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        objects = [
            item for value in state.values() for item in (value if isinstance(value, (list, tuple)) else [value])
        ]
        self._optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer) and _is_hooked(item)]
        self._modules = [module for value in state.values() for module in modules_of(value)]
        self._handles: list[Any] = []
        ranges = sorted(((*_extent(_local(tensor)), tensor) for tensor in self._stepped()), key=itemgetter(0))
        self._begins = [begin for begin, *_ in ranges]
        self._ends = [end for _, end, _ in ranges]
        self._holders = [tensor for *_, tensor in ranges]

    def holder_of(self, dense: torch.Tensor) -> torch.Tensor | None:
        """The optimizer's own tensor (a parameter, or state of one) in whose memory ``dense`` lies; None where steps
        are not all that changes it, or where a change that passes by the hooks could not be seen.

        In-place operations on the holder raise its ``_version``, those of ``.data`` apart.
        """
        begin, end = _extent(dense)
        at = bisect_right(self._begins, begin) - 1
        return self._holders[at] if begin < end and at >= 0 and end <= self._ends[at] else None

    def register(self, hold: Callable[[], None]) -> None:
        """Call ``hold`` in front of every step and every load, in the thread that makes it. ``holder_of`` is over."""
        hook = _Hook(hold)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(hook))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(hook))
        # On all of them, because a part of a model can be loaded too.
        owners = {id(part): part for module in self._modules for part in module.modules() if part._parameters}
        for owner in owners.values():
            self._handles.append(owner.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        # Handles refer to the objects weakly.
        self._optimizers, self._modules, self._holders = [], [], []

    def remove(self) -> None:
        """Take the hooks off. Not to be called inside one of them, or while another thread may be: torch walks over
        what this changes."""
        while self._handles:
            self._handles.pop().remove()

    def _stepped(self) -> Iterator[torch.Tensor]:
        """Every tensor that changes in steps alone, and tells it."""
        for optimizer in self._optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            yield from (param for param in params if _can_tell(param))
            for param, entries in optimizer.state.items():
                if isinstance(param, torch.Tensor) and isinstance(entries, Mapping):
                    yield from (v for v in entries.values() if isinstance(v, torch.Tensor) and _can_tell(v))


class _Hook:
    """Callable as any hook. A copy of the object that it is registered with gets one that does nothing."""

    def __init__(self, hold: Callable[[], None] | None = None) -> None:
        self._hold = hold

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if self._hold is not None:
            self._hold()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch runs hooks around its ``step``: not where a class goes without ``Optimizer.__init__``."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _can_tell(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory, and counts its changes."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor
    return local_tensor(tensor) if not plain and is_dtensor(tensor) else tensor


def _extent(dense: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory and the one behind its last; equal where it has none."""
    count = dense.numel()
    if not count:
        return 0, 0
    begin = dense.data_ptr()
    if not dense.is_contiguous():
        count = 1 + sum((length - 1) * stride for length, stride in zip(dense.shape, dense.stride()))
    return begin, begin + count * dense.element_size()
