"""``orbax-checkpoint``, for JAX. It has no PyTorch tensors, so it saves NumPy arrays in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["Orbax"]


class Orbax(Contestant):
    """Uses the defaults: OCDBT and zstd. It restores into new arrays, which a load copies into the tensors."""

    def __init__(self, *, background: bool = False) -> None:
        handler = ocp.PyTreeCheckpointHandler()
        self._checkpointer = ocp.AsyncCheckpointer(handler) if background else ocp.Checkpointer(handler)

    def save(self, path: str, state: Tensors) -> Pending | None:
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(_arrays(state)))
        if isinstance(self._checkpointer, ocp.AsyncCheckpointer):
            return Pending(self._checkpointer.wait_until_finished)
        return None

    def load(self, path: str, state: Tensors) -> None:
        stored = self._checkpointer.restore(path, args=ocp.args.PyTreeRestore(_arrays(state)))
        for name, array in _arrays(state).items():
            np.copyto(array, stored[name])

    def versions(self) -> Mapping[str, str]:
        return {"orbax-checkpoint": version("orbax-checkpoint")}

    def close(self) -> None:
        self._checkpointer.close()


def _arrays(state: Tensors) -> dict[str, np.ndarray]:
    """Return the state's tensors as arrays that share their memory."""
    return {name: _array(tensor) for name, tensor in state.flat.items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # NumPy alone has no such dtype
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
