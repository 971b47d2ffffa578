"""``fastsafetensors``: loads safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fastsafetensors import fastsafe_open

from benchmarks.peers.base import Tensors
from benchmarks.peers.safetensors_file import Safetensors, file_in

__all__ = ["Fastsafetensors"]


class Fastsafetensors(Safetensors):
    """Reads files that ``safetensors`` wrote, without GPUDirect storage."""

    def load(self, path: str, state: Tensors) -> None:
        with fastsafe_open(filenames=[file_in(path)], nogds=True, device="cpu", debug_log=False) as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                state.flat[name].copy_(stored.get_tensor(name))

    def versions(self) -> Mapping[str, str]:
        return {"fastsafetensors": version("fastsafetensors")}
