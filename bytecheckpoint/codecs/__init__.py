"""Compress stored bytes with named codecs.

Format version 1 stores data files raw, so this is only an interface for later versions.
"""

from __future__ import annotations

from .base import Codec
from .builtin import RawCodec, ZstdCodec
from .registry import ENTRY_POINT_GROUP, find_codec, list_codecs

__all__ = ["ENTRY_POINT_GROUP", "Codec", "RawCodec", "ZstdCodec", "find_codec", "list_codecs"]
