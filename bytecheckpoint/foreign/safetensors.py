"""Open folders of safetensors files as if they were checkpoints. Their files have no checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checkpoint.checkpoint import Checkpoint
from ..engine.checksums import chunk_size_for
from ..engine.resources import IOEngine
from ..errors import CheckpointNotFoundError, NotACheckpointError
from ..format.manifest import Manifest
from .manifest import TensorFile, whole_tensor_manifest
from .safetensors_folder import SafetensorsFolder, meta_of

__all__ = ["ForeignCheckpoint", "open_safetensors"]

_SECTION = "model"


class ForeignCheckpoint(Checkpoint):
    """The tensors of another library's files, in the section ``model``. Nothing in them is checked."""

    has_checksums = False

    def __init__(self, folder: SafetensorsFolder, engine: IOEngine) -> None:
        """Create a handle on the files of ``folder``."""
        super().__init__(folder.backend, _manifest(folder), engine, verify=False)


def open_safetensors(
    url: str, engine: IOEngine, *, storage_options: Mapping[str, Any] | None = None
) -> ForeignCheckpoint | None:
    """Open the folder or file in Hugging Face's layout at ``url``. Return None if there is none.

    Reads the headers and compares them with the index. Raises what ``SafetensorsFolder`` raises for damaged files.
    """
    try:
        folder = SafetensorsFolder(url, storage_options=storage_options)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return ForeignCheckpoint(folder, engine)


def _manifest(folder: SafetensorsFolder) -> Manifest:
    """Return a manifest as a save in one process would have written it, but with meaningless checksums."""
    chunk_size = chunk_size_for(folder.nbytes)
    files = []
    for key, header in folder.headers.items():
        url = f"{folder.backend.url}/{key}"
        tensors = [(record.name, meta_of(record, url), record.begin) for record in header.entries]
        chunks = sum(-(-meta.nbytes // chunk_size) for _, meta, _ in tensors)
        end = header.data_start + max((record.end for record in header.entries), default=0)
        files.append(TensorFile(key, end, header.data_start, 0, tensors, np.zeros(chunks, np.uint64)))
    return whole_tensor_manifest(_SECTION, files, chunk_size=chunk_size)
