"""The built-in codecs."""

from __future__ import annotations

import zstandard
from typing_extensions import Buffer

from ..errors import FormatError
from .base import Codec

__all__ = ["RawCodec", "ZstdCodec"]


class RawCodec(Codec):
    """Store the bytes unchanged."""

    name = "raw"

    def compress(self, data: Buffer) -> bytes:
        return bytes(data)

    def decompress(self, data: Buffer, size: int) -> bytes:
        if memoryview(data).nbytes != size:
            raise FormatError(f"found {memoryview(data).nbytes} raw bytes, expected {size}")
        return bytes(data)


class ZstdCodec(Codec):
    """Store one Zstandard frame that states its content size.

    Args:
        level: The compression level, from 1 (fastest) to 22.
    """

    name = "zstd"

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def compress(self, data: Buffer) -> bytes:
        # zstandard's objects are not thread-safe, so each call creates one.
        return zstandard.ZstdCompressor(level=self.level, write_content_size=True).compress(memoryview(data))

    def decompress(self, data: Buffer, size: int) -> bytes:
        try:
            # zstandard allocates the size that the frame states, regardless of max_output_size: check it first.
            if zstandard.frame_content_size(memoryview(data)) != size:
                raise FormatError(f"a zstd frame does not state the expected content size of {size} bytes")
            content = zstandard.ZstdDecompressor().decompress(
                memoryview(data), max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(f"{memoryview(data).nbytes} bytes are not a zstd frame: {error}") from None
        if len(content) != size:
            raise FormatError(f"a zstd frame holds {len(content)} bytes, but states {size}")
        return content
