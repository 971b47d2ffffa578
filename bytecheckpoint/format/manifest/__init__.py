"""The manifest: the document that describes what a checkpoint contains and where each byte is.

``document`` is the manifest in memory; ``validation`` and ``tiling`` check it; ``codec`` encodes the envelope, which
all versions share; ``version1`` encodes the payload from ``columns``.
"""

from __future__ import annotations

from .codec import FORMAT_VERSION, MANIFEST_KEY, MAX_MANIFEST_BYTES, START, decode, encode
from .document import COMPANION, FileTable, Manifest, SectionInfo, UInt64, timestamp
from .validation import validate, validate_foreign
from .version1 import ManifestV1, pack_metadata

__all__ = [
    "COMPANION",
    "FORMAT_VERSION",
    "MANIFEST_KEY",
    "MAX_MANIFEST_BYTES",
    "START",
    "FileTable",
    "Manifest",
    "ManifestV1",
    "SectionInfo",
    "UInt64",
    "decode",
    "encode",
    "pack_metadata",
    "timestamp",
    "validate",
    "validate_foreign",
]
