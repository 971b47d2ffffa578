"""The manifest: the document that describes what a checkpoint contains and where each byte is.

``document`` is the manifest in memory, and ``files`` its part about the data files; ``validation`` and ``tiling`` check
it; ``payload`` encodes it as ``columns``, and ``envelope`` adds the version and a checksum.
"""

from __future__ import annotations

from .document import Manifest, SectionInfo, Summary, timestamp
from .envelope import (
    FORMAT_VERSION,
    MANIFEST_KEY,
    MANIFEST_TRAILER,
    MAX_MANIFEST_BYTES,
    START,
    decode,
    decode_summary,
    encode,
)
from .files import (
    COMPANION,
    MAX_ENCODED_CHUNK,
    FileTable,
    FrameTable,
    ReferenceTable,
    encoded_head,
    is_encoded,
)
from .payload import SAVE_TIMES_KEY, pack_metadata, pack_payload, unpack_payload
from .validation import validate, validate_foreign

__all__ = [
    "COMPANION",
    "FORMAT_VERSION",
    "MANIFEST_KEY",
    "MANIFEST_TRAILER",
    "MAX_ENCODED_CHUNK",
    "MAX_MANIFEST_BYTES",
    "SAVE_TIMES_KEY",
    "START",
    "FileTable",
    "FrameTable",
    "Manifest",
    "ReferenceTable",
    "SectionInfo",
    "Summary",
    "decode",
    "decode_summary",
    "encode",
    "encoded_head",
    "is_encoded",
    "pack_metadata",
    "pack_payload",
    "timestamp",
    "unpack_payload",
    "validate",
    "validate_foreign",
]
