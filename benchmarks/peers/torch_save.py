"""``torch.save`` and ``torch.load``."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["TorchSave"]


class TorchSave(Contestant):
    """Writes one file. A load reads it, or maps it (``mapped``), and copies into the state's tensors."""

    def __init__(self, *, mapped: bool = False) -> None:
        self._mapped = mapped

    def save(self, path: str, state: Tensors) -> Pending | None:
        os.mkdir(path)
        torch.save(state.sections, os.path.join(path, "state.pt"))
        return None

    def load(self, path: str, state: Tensors) -> None:
        stored = torch.load(os.path.join(path, "state.pt"), weights_only=True, mmap=self._mapped)
        for section, tensors in state.sections.items():
            for name, tensor in tensors.items():
                tensor.copy_(stored[section][name])

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}
