"""The manifest: the one document that says what a checkpoint holds and where each byte lies.

``docs/format.md`` is normative. ``document`` is the manifest in memory, ``rules`` proves one, ``codec`` writes and
reads its bytes, ``columns`` and ``plain`` are the pieces that ``codec`` is made of.
"""

from __future__ import annotations

from .codec import FORMAT_VERSION, MANIFEST_KEY, MAX_MANIFEST_BYTES, decode, encode, pack_metadata
from .document import FileTable, Manifest, SectionInfo, UInt64
from .rules import validate

__all__ = [
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
    "validate",
]
