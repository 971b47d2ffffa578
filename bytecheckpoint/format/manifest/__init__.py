"""The manifest: the document that describes what a checkpoint contains and where each byte is.

``document`` is the manifest in memory; ``validation`` and ``tiling`` check it; ``codec`` encodes the envelope, which
all versions share; ``version1`` and ``version2`` encode the payload from ``columns``; ``frames`` describes encoded
files.
"""

from __future__ import annotations

from .codec import FORMAT_VERSION, MANIFEST_KEY, MANIFEST_TRAILER, MAX_MANIFEST_BYTES, START, decode, encode
from .document import COMPANION, FileTable, Manifest, SectionInfo, UInt64, timestamp
from .frames import (
    MAX_ENCODED_CHUNK,
    PARENT,
    FrameTable,
    ReferenceTable,
    encoded_head,
    is_encoded,
    split_reference,
)
from .validation import validate, validate_foreign
from .version1 import ManifestV1, pack_metadata
from .version2 import ManifestV2

__all__ = [
    "COMPANION",
    "FORMAT_VERSION",
    "MANIFEST_KEY",
    "MANIFEST_TRAILER",
    "MAX_ENCODED_CHUNK",
    "MAX_MANIFEST_BYTES",
    "PARENT",
    "START",
    "FileTable",
    "FrameTable",
    "Manifest",
    "ManifestV1",
    "ManifestV2",
    "ReferenceTable",
    "SectionInfo",
    "UInt64",
    "decode",
    "encode",
    "encoded_head",
    "is_encoded",
    "pack_metadata",
    "split_reference",
    "timestamp",
    "validate",
    "validate_foreign",
]
