"""The codecs that are always there."""

from __future__ import annotations

import zstandard
from typing_extensions import Buffer

from ..errors import FormatError
from .base import Codec

__all__ = ["RawCodec", "ZstdCodec"]


class RawCodec(Codec):
    """The bytes themselves."""

    name = "raw"

    def compress(self, data: Buffer) -> bytes:
        return bytes(data)

    def decompress(self, data: Buffer, size: int) -> bytes:
        if memoryview(data).nbytes != size:
            raise FormatError(f"{memoryview(data).nbytes} raw bytes stand where {size} are announced")
        return bytes(data)


class ZstdCodec(Codec):
    """One Zstandard frame that states its content size."""

    name = "zstd"

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def compress(self, data: Buffer) -> bytes:
        # zstandard's objects must not be shared between threads, so each call makes its own.
        return zstandard.ZstdCompressor(level=self.level, write_content_size=True).compress(memoryview(data))

    def decompress(self, data: Buffer, size: int) -> bytes:
        try:
            # zstandard allocates what the frame itself announces, whatever max_output_size says: look at that first.
            if zstandard.frame_content_size(memoryview(data)) != size:
                raise FormatError(f"a zstd frame does not announce the {size} bytes it should hold")
            content = zstandard.ZstdDecompressor().decompress(
                memoryview(data), max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(f"{memoryview(data).nbytes} bytes are not a zstd frame: {error}") from None
        if len(content) != size:
            raise FormatError(f"a zstd frame holds {len(content)} bytes, not the {size} it announces")
        return content
