"""The Run:ai model streamer: loads safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from runai_model_streamer import SafetensorsStreamer

from benchmarks.peers.base import Tensors
from benchmarks.peers.safetensors_file import Safetensors, file_in

__all__ = ["RunaiStreamer"]


class RunaiStreamer(Safetensors):
    """Reads files that ``safetensors`` wrote, with the default concurrency."""

    def load(self, path: str, state: Tensors) -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(file_in(path))
            for name, tensor in streamer.get_tensors():
                state.flat[name].copy_(tensor)

    def versions(self) -> Mapping[str, str]:
        return {"runai-model-streamer": version("runai-model-streamer")}
