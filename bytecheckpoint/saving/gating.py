"""The gate of a save with ``gate=True``: what may be copied after the call, and what has to wait until it is copied.

Parameters and optimizer state that change only in steps of the state's own optimizers are *late*: they are copied after
``save`` has returned. Those steps wait for the copy, and so do ``load_state_dict`` of the optimizers and modules, and
loads of this library. Everything else (buffers, tensors of trees, parameters that no optimizer steps) is copied before
``save`` returns. If anything else changes a late tensor before it is copied, the save fails.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..engine.files import FileImage
from ..engine.staging.staging import Staging
from ..errors import StateError
from ..frameworks.dtensor import attached_local_tensor, is_dtensor
from ..frameworks.module_tree import modules_of
from ..runtime.messages import listed
from .engine import SaveEngine


class SaveGate:
    """The gate of one save. The training thread creates, closes, passes and removes it."""

    def __init__(self, state: Mapping[str, Any], images: Sequence[FileImage]) -> None:
        self._hooks = StepHooks(state)
        self._late: set[int] = set()
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        for image in images:
            for shard in image.shards:
                holder = self._hooks.holder_of(shard.tensor)
                if holder is not None:
                    # It keeps its memory when the caller gives the parameter another one: parameter.data = ...
                    shard.tensor = shard.tensor.detach()
                    self._late.add(id(shard.tensor))
                    name = f"{image.section}.{shard.fqn}" if image.section else shard.fqn
                    self._watched.append((name, holder, holder._version))
        self._staging: Staging | None = None
        self._deadline_s: float | None = None
        self._pid = os.getpid()

    def close(self, engine: SaveEngine, staging: Staging, deadline_s: float) -> None:
        """Copy what is not late. From here on, changes of late tensors wait until ``staging`` has copied these too.

        ``engine`` is the one that copies; ``pass_gates`` finds the gate by it.
        """
        # The gate may outlive the save and must not keep the state alive.
        watched, self._watched = self._watched, []
        staging.fill_early(self._is_late, partial(_check_unchanged, watched))
        staging.make_caller_wait()
        self._staging, self._deadline_s = staging, deadline_s
        self._hooks.register(self.wait_open)
        _closed_gates.setdefault(engine, []).append(self)

    def wait_open(self) -> None:
        """Return when late tensors may change: they are copied, or the save has failed. Raises nothing."""
        staging = self._staging
        # A forked child has its own copy of the state and no thread that would finish copying.
        if staging is not None and self._pid == os.getpid():
            staging.wait_changeable(self._deadline_s)
            if staging.is_copied():
                self._staging = None

    def remove(self) -> None:
        """Remove the hooks from modules and optimizers. Call it on the training thread."""
        self._hooks.remove()

    def _is_late(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._late


# Closed gates, by the engine that copies. The mapping is process-wide because tensors are: a load through one
# Checkpointer must not overwrite what a gated save of another one has yet to copy.
_closed_gates: WeakKeyDictionary[SaveEngine, list[SaveGate]] = WeakKeyDictionary()


def pass_gates(*engines: SaveEngine) -> None:
    """Return when no gated save has anything left to copy: none of ``engines``, or without any, none of this process.

    Call it on the training thread, which may not be inside a hook of torch: it removes hooks.
    """
    for engine in engines or tuple(_closed_gates):
        gates = _closed_gates.get(engine, [])
        while gates:
            gate = gates.pop()
            gate.wait_open()
            gate.remove()


def _check_unchanged(watched: Sequence[tuple[str, torch.Tensor, int]]) -> None:
    changed = [name for name, holder, version in watched if holder._version != version]
    if changed:
        raise StateError(
            f"{listed(changed, 3)}: changed after save(gate=True) was called and before handle.staged(), "
            f"but not by a step of an optimizer of the saved state, by load_state_dict or by a load of this library, "
            f"which would have waited. Nothing was saved. Add the optimizer that changes it to the state, call "
            f"handle.wait_staged() first, or save without a gate"
        )


class StepHooks:
    """Hooks before every step and load that may change the tensors of a state's optimizers.

    The optimizers are ``torch.optim.Optimizer`` objects and lists of them.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        objects = [
            item for value in state.values() for item in (value if isinstance(value, (list, tuple)) else [value])
        ]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        # Torch runs no hooks around ``step`` of a class that never calls ``Optimizer.__init__``.
        self._optimizers = [item for item in optimizers if getattr(type(item).step, "hooked", False)]
        self._modules = [module for value in state.values() for module in modules_of(value)]
        self._handles: list[Any] = []
        # By id of the tensor with the memory, which the entry keeps alive.
        self._stepped = {id(local): (local, holder) for local, holder in self._find_stepped()}

    def holder_of(self, dense: torch.Tensor) -> torch.Tensor | None:
        """The optimizer's tensor, a parameter or its state, whose memory contains ``dense``.

        None if anything but a step may change ``dense``, or if a change without a hook could not be detected. In-place
        operations on the holder increase its ``_version``, except for those through ``.data``.
        """
        found = self._stepped.get(id(dense))  # almost always
        if found is not None:
            return found[1]
        begin, end = _extent(dense)
        at = bisect_right(self._ranges, begin, key=itemgetter(0)) - 1
        if begin == end or at < 0:
            return None
        _, last, holder = self._ranges[at]
        return holder if end <= last else None

    @cached_property
    def _ranges(self) -> list[tuple[int, int, torch.Tensor]]:
        """Where the memory of each stepped tensor begins and ends."""
        return sorted(((*_extent(local), holder) for local, holder in self._stepped.values()), key=itemgetter(0))

    def register(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` before every step and every load, in its thread. ``holder_of`` finds nothing afterwards."""
        hook = _Hook(wait)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(hook))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(hook))
        # On every submodule, because a part of a model can be loaded separately.
        owners = {id(part): part for module in self._modules for part in module.modules() if part._parameters}
        for owner in owners.values():
            self._handles.append(owner.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        # The handles hold weak references only; neither do these lists keep the objects alive.
        self._optimizers, self._modules, self._stepped = [], [], {}
        self.__dict__.pop("_ranges", None)

    def remove(self) -> None:
        """Remove the hooks. Do not call this inside a hook, or while another thread may run one: torch iterates over
        the dictionaries that this changes."""
        while self._handles:
            self._handles.pop().remove()

    def _find_stepped(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every tensor that only steps change, and that counts its changes, after the tensor that has its memory."""
        for optimizer in self._optimizers:
            tensors = [param for group in optimizer.param_groups for param in group["params"]]
            for param, entries in optimizer.state.items():
                if isinstance(param, torch.Tensor) and isinstance(entries, Mapping):
                    tensors += [value for value in entries.values() if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference():
                    yield attached_local_tensor(tensor) if is_dtensor(tensor) else tensor, tensor


class _Hook:
    """A hook of any kind. In a copy of the object that it is registered with, it does nothing."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if self._wait is not None:
            self._wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _extent(dense: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory, and the address after its last byte; equal for an empty tensor."""
    count = dense.numel()
    if not count:
        return 0, 0
    begin = dense.data_ptr()
    if not dense.is_contiguous():
        count = 1 + sum((length - 1) * stride for length, stride in zip(dense.shape, dense.stride(), strict=True))
    return begin, begin + count * dense.element_size()
