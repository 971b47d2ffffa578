"""The ``safetensors`` library."""

from __future__ import annotations

import os
from collections.abc import Mapping

import safetensors
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["Safetensors", "file_in"]


def file_in(path: str) -> str:
    """Return the only file of a checkpoint at ``path``."""
    return os.path.join(path, "state.safetensors")


class Safetensors(Contestant):
    """Writes one file. A load maps it and copies each tensor into the state."""

    def save(self, path: str, state: Tensors) -> Pending | None:
        os.mkdir(path)
        save_file(state.flat, file_in(path))
        return None

    def load(self, path: str, state: Tensors) -> None:
        with safe_open(file_in(path), framework="pt") as stored:
            for name, tensor in state.flat.items():
                tensor.copy_(stored.get_tensor(name))

    def versions(self) -> Mapping[str, str]:
        return {"safetensors": safetensors.__version__}
