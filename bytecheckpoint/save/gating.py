"""A save whose copy goes on behind the forward and backward pass: what may be copied late, and who has to wait for it.

Late are parameters and optimizer state that change in steps of the state's own optimizers alone. These steps wait, and
so do ``load_state_dict`` of the optimizers and modules, and loads of this library. Everything else (buffers, tensors of
trees, parameters that nobody steps) is copied before ``save`` returns. A change of something late that passes by all
that makes the save fail.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .engine.files import FileImage
from .engine.staging.staging import Staging
from .errors import StateError
from .frameworks.step_hooks import StepHooks

__all__ = ["SaveGate"]


class SaveGate:
    """The gate of one save. Made and ``shut`` by the caller of the save, in whose thread the rest runs too."""

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

    def shut(self, staging: Staging, deadline_s: float) -> None:
        """Copy what is not late; from here on all others wait until ``staging`` has copied the rest too."""
        # What the gate holds after the save must not keep the state alive.
        watched, self._watched = self._watched, []
        staging.fill_early(self._is_late, partial(_check_unchanged, watched))
        staging.hold_caller()
        self._staging, self._deadline_s = staging, deadline_s
        self._hooks.register(self.pass_through)

    def pass_through(self) -> None:
        """Return when late tensors may be changed. Where the save fails, that is at once, and nothing is raised: the
        failure is the save's."""
        staging = self._staging
        # A forked child has its own copy of the state, and nobody who would finish copying.
        if staging is not None and self._pid == os.getpid():
            staging.let_change(self._deadline_s)
            if staging.is_settled():
                self._staging = None

    def remove(self) -> None:
        """Take everything off that the gate has put on modules and optimizers. In the thread that trains."""
        self._hooks.remove()

    def _is_late(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._late


def _check_unchanged(watched: Sequence[tuple[str, torch.Tensor, int]]) -> None:
    changed = [name for name, holder, version in watched if holder._version != version]
    if changed:
        others = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise StateError(
            f"{', '.join(changed[:3])}{others}: changed after the call of save(gate=True) and before handle.staged(), "
            f"but not by a step of an optimizer of the saved state, by load_state_dict or by a load of this library, "
            f"which would have waited; nothing was saved. Put the optimizer that does it into the state, call "
            f"handle.wait_staged() first, or save without a gate"
        )
