"""Compress stored bytes with named codecs.

Format version 1 stores data files raw, so this is only an interface for later versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar

import zstandard
from typing_extensions import Buffer

from .errors import FormatError, UnsupportedVersionError

__all__ = ["ENTRY_POINT_GROUP", "Codec", "RawCodec", "ZstdCodec", "find_codec", "list_codecs"]

ENTRY_POINT_GROUP = "bytecheckpoint.codecs"


class Codec(ABC):
    """Compress and decompress bytes.

    A codec is stateless: one instance serves every call and every thread. A later version of a codec must read what an
    earlier version has written.
    """

    name: ClassVar[str]
    """The codec's name in the manifest: lower-case letters, digits and ``-``."""

    @abstractmethod
    def compress(self, data: Buffer) -> bytes:
        """Encode bytes.

        Args:
            data: Any contiguous buffer.

        Returns:
            The encoded bytes, which may be longer than ``data``.
        """

    @abstractmethod
    def decompress(self, data: Buffer, size: int) -> bytes:
        """Decode bytes.

        ``data`` may be hostile: an implementation must not allocate more than in proportion to ``size`` and
        ``len(data)``.

        Args:
            data: What ``compress`` has returned.
            size: The exact number of decoded bytes.

        Returns:
            The ``size`` decoded bytes.

        Raises:
            FormatError: ``data`` cannot be decoded, or decodes to another number of bytes.
        """


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


_BUILTIN: dict[str, type[Codec]] = {codec.name: codec for codec in (RawCodec, ZstdCodec)}


@cache
def find_codec(name: str) -> Codec:
    """Return the codec of this name.

    A codec is built in, or a class that another package registers under the entry point group
    ``bytecheckpoint.codecs``. A package cannot replace a built-in codec.

    Args:
        name: The codec's name in the manifest.

    Returns:
        One shared instance.

    Raises:
        UnsupportedVersionError: No codec has this name. The message lists the known names.
    """
    if name in _BUILTIN:
        return _BUILTIN[name]()
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        codec = found.load()()
        if not isinstance(codec, Codec) or codec.name != name:
            raise UnsupportedVersionError(
                f"entry point {found.value} does not create a Codec named {name!r}; fix or remove its package"
            )
        return codec
    raise UnsupportedVersionError(
        f"no codec is named {name!r:.80}; known: {', '.join(list_codecs())}. Install the package that provides it"
    )


def list_codecs() -> list[str]:
    """Return the names that ``find_codec`` accepts, sorted."""
    return sorted({*_BUILTIN, *(found.name for found in entry_points(group=ENTRY_POINT_GROUP))})
