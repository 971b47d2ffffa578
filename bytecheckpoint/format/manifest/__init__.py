"""The manifest: the one document that says what a checkpoint holds and where each byte lies.

``docs/format.md`` is normative. ``document`` is the manifest in memory; ``rules`` and ``tilings`` prove one; ``codec``
writes and reads the envelope that all versions share, ``version1`` its payload, which is made of ``columns``.
"""

from __future__ import annotations

from .codec import FORMAT_VERSION, MANIFEST_KEY, MAX_MANIFEST_BYTES, decode, encode
from .document import COMPANION, FileTable, Manifest, SectionInfo, UInt64, timestamp
from .rules import validate
from .version1 import pack_metadata

__all__ = [
    "COMPANION",
    "FORMAT_VERSION",
    "MANIFEST_KEY",
    "MAX_MANIFEST_BYTES",
    "FileTable",
    "Manifest",
    "SectionInfo",
    "UInt64",
    "decode",
    "encode",
    "pack_metadata",
    "timestamp",
    "validate",
]
