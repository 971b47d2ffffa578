"""The gate of a save with ``gate=True``: what may be copied after the call, and what has to wait until it is copied.

Parameters and optimizer state that change only in steps of the state's own optimizers are *late*: they are copied after
``save`` has returned. Those steps wait for the copy, and so do ``load_state_dict`` of the optimizers and modules, and
loads of this library. Everything else (buffers, tensors of trees, parameters that no optimizer steps) is copied before
``save`` returns. If anything else changes a late tensor before it is copied, the save fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..engine.files import FileImage
from ..engine.staging.staging import Staging
from ..errors import StateError
from ..frameworks.step_hooks import StepHooks
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
