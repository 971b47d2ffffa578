"""Codecs: compression of stored bytes, by name. The interface only: data files of format version 1 are raw."""

from __future__ import annotations

from .base import Codec
from .builtin import RawCodec, ZstdCodec
from .registry import ENTRY_POINT_GROUP, codec_named, codec_names

__all__ = ["ENTRY_POINT_GROUP", "Codec", "RawCodec", "ZstdCodec", "codec_named", "codec_names"]
