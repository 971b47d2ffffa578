"""This library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import bytecheckpoint as bcp
from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["Library", "Objects"]


class Library(Contestant):
    """``bytecheckpoint`` with its defaults: with checksums, and one checkpointer for the whole run."""

    durable = True

    def __init__(self, *, background: bool = False, verify: bool = True) -> None:
        self._background, self._verify = background, verify
        self._checkpointer = bcp.Checkpointer()
        self._stages: Mapping[str, float] = {}

    def save(self, path: str, state: Any) -> Pending | None:
        handle = self._checkpointer.save(path, state.sections, async_save=self._background)
        self._stages = handle.timings.seconds
        return Pending(handle.result) if self._background else None

    def load(self, path: str, state: Any) -> None:
        report = self._checkpointer.load(path, state.sections, options=bcp.LoadOptions(verify=self._verify))
        self._stages = report.timings.seconds

    def warm_up(self, state: Any) -> None:
        """Prepare for saves of the state."""
        self._checkpointer.warmup(state.sections)

    def versions(self) -> Mapping[str, str]:
        return {"bytecheckpoint": bcp.__version__}

    def stages(self) -> Mapping[str, float]:
        return dict(self._stages)

    def close(self) -> None:
        self._checkpointer.close()


class Objects(Library):
    """An asynchronous save of a module and an optimizer over the state's memory, with or without a gate."""

    def __init__(self, *, gate: bool) -> None:
        super().__init__(background=True)
        self._gate = gate
        self._objects: dict[str, Any] | None = None

    def save(self, path: str, state: Any) -> Pending | None:
        if self._objects is None:
            self._objects = _objects(state) if isinstance(state.sections["model"], dict) else state.sections
        options = bcp.SaveOptions(gate=self._gate)
        handle = self._checkpointer.save(path, self._objects, async_save=True, options=options)
        self._stages = handle.timings.seconds
        return Pending(handle.result, gate=handle.wait_staged if self._gate else None)


def _objects(state: Tensors) -> dict[str, Any]:
    """Return the state's tensors as a module's parameters and their AdamW state."""
    module = nn.Module()
    parameters = {name: nn.Parameter(tensor) for name, tensor in state.sections["model"].items()}
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        holder = module
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(last, parameter)
    optimizer = torch.optim.AdamW(parameters.values())
    for name, tensor in state.sections.get("optimizer", {}).items():
        of, _, key = name.removeprefix("state.").rpartition(".")
        optimizer.state[parameters[of]][key] = tensor
    return {"model": module, "optimizer": optimizer}
