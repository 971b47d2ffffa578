"""CoreWeave's ``tensorizer``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

from tensorizer import TensorDeserializer, TensorSerializer

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["Tensorizer"]


class Tensorizer(Contestant):
    """Writes one file. A load reads it tensor by tensor and copies into the state."""

    def save(self, path: str, state: Tensors) -> Pending | None:
        os.mkdir(path)
        serializer = TensorSerializer(_file_in(path))
        serializer.write_state_dict(state.flat)
        serializer.close()
        return None

    def load(self, path: str, state: Tensors) -> None:
        with TensorDeserializer(_file_in(path), device="cpu") as stored:
            for name, tensor in state.flat.items():
                tensor.copy_(stored[name])

    def versions(self) -> Mapping[str, str]:
        return {"tensorizer": version("tensorizer")}


def _file_in(path: str) -> str:
    return os.path.join(path, "state.tensors")
