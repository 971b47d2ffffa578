"""Read the files of ``torch.save``: what they contain, and where the bytes of the tensors are."""

from __future__ import annotations

from .embedded import read_embedded
from .torch_archive import LEGACY_MAGIC, TorchArchive, read_archive

__all__ = ["LEGACY_MAGIC", "TorchArchive", "read_archive", "read_embedded"]
