"""The index of a model in Hugging Face's layout: the safetensors file of each tensor; and pointers of Git LFS.

With ``layout="whole"`` a save writes it next to the data files. Export writes it and import reads it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..errors import NotACheckpointError
from .manifest.document import Manifest
from .manifest.files import COMPANION

INDEX_KEY = "model.safetensors.index.json"
SINGLE_KEY = "model.safetensors"
CONFIG_KEY = "config.json"
ADAPTER_CONFIG_KEY = "adapter_config.json"
ADAPTER_SECTION = "adapter_model"
"""The section whose only file is the one that PEFT reads."""


def index_document(file_of: Mapping[str, str], total_size: int) -> bytes:
    """Return an index: the file of each tensor by name, and the size of all tensors in bytes."""
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_of.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def model_directory(manifest: Manifest) -> str | None:
    """Return the directory, relative to the checkpoint, that other libraries can load as a model.

    None if there is none.
    """
    name = INDEX_KEY if manifest.section_index(ADAPTER_SECTION) is None else ADAPTER_CONFIG_KEY
    key = f"{manifest.attempt}/{name}"
    row = manifest.files.name.index(key) if key in manifest.files.name else None
    return None if row is None or manifest.files.kind[row] != COMPANION else manifest.attempt


_START = b"version http"  # no file that this library reads begins so


def refuse_pointer(head: bytes, where: str) -> None:
    """Raise ``NotACheckpointError`` if a file that begins with ``head`` (12 bytes suffice) is such a pointer."""
    if head.startswith(_START):
        raise NotACheckpointError(f"{where} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
