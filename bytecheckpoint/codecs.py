"""Encode the chunks of data files with named codecs."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar

import numpy as np
import zstandard

from .errors import FormatError, UnsupportedVersionError

__all__ = ["ENTRY_POINT_GROUP", "Codec", "PlainCodec", "ZstdCodec", "ZstdPlanesCodec", "find_codec", "list_codecs"]

ENTRY_POINT_GROUP = "bytecheckpoint.codecs"

_SAMPLE_BYTES = 4096  # of a plane; enough to recognize a mantissa
_MIN_GAIN = 0.03
_LEVEL = 1  # the fastest
_MAX_WIDTH = 16  # bytes of the widest element


class Codec(ABC):
    """Encode chunks of tensors as frames, and decode them.

    Each chunk is encoded separately, so that a part of a tensor can be read. A codec is stateless: one instance serves
    every call and every thread. A later version of a codec must read what an earlier version has written.
    """

    name: ClassVar[str]
    """The codec's name in the manifest, of at most 40 lower-case letters, digits and ``-``, and not ``raw``."""

    @abstractmethod
    def encode(self, data: memoryview, width: int) -> bytes:
        """Encode a chunk.

        Args:
            data: The chunk, as bytes. It may begin and end inside an element.
            width: Bytes of one floating-point number if the tensor consists of such numbers, else 1.

        Returns:
            The frame. If it is not shorter than the chunk, the chunk is stored instead.
        """

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview) -> None:
        """Decode a frame.

        The frame may be hostile: an implementation must not allocate more than in proportion to the lengths of
        ``frame`` and ``out``.

        Args:
            frame: What ``encode`` has returned.
            out: Writable bytes, as many as the chunk has. All of them are filled.

        Raises:
            FormatError: The frame cannot be decoded, or decodes to another number of bytes.
        """


class PlainCodec(Codec):
    """Store chunks as they are, in a file whose other chunks are in files of older checkpoints."""

    name = "plain"

    def encode(self, data: memoryview, width: int) -> bytes:
        return bytes(data)

    def decode(self, frame: memoryview, out: memoryview) -> None:
        raise FormatError(f"a frame of {len(frame)} bytes is not a plain chunk of {len(out)}")


class ZstdCodec(Codec):
    """Store one Zstandard frame that states its content size."""

    name = "zstd"

    def encode(self, data: memoryview, width: int) -> bytes:
        return _compress(data)

    def decode(self, frame: memoryview, out: memoryview) -> None:
        # A slice assignment of memoryviews would hold the interpreter lock.
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(_decompress(frame, len(out)), np.uint8))


class ZstdPlanesCodec(Codec):
    """Store the bytes of floating-point numbers by significance, as planes, each of which compresses separately.

    Signs and exponents compress well, mantissas hardly: a plane of which a sample gains less than 3 % is stored as it
    is. A frame is one byte ``w``, ``w`` lengths (32 bits, little-endian), and ``w`` planes back to back. Plane ``i``
    has the bytes ``i``, ``i + w``, ... of the chunk, as a Zstandard frame, or as they are if its length is theirs.
    """

    name = "zstd-planes"

    def encode(self, data: memoryview, width: int) -> bytes:
        chunk = np.frombuffer(data, np.uint8)
        if not 1 <= width <= _MAX_WIDTH or len(chunk) % width:
            width = 1
        planes = [self._plane(np.ascontiguousarray(plane).data) for plane in chunk.reshape(-1, width).T]
        return b"".join([struct.pack(f"<B{width}I", width, *map(len, planes)), *planes])

    def decode(self, frame: memoryview, out: memoryview) -> None:
        width = frame[0] if len(frame) else 0
        if not 1 <= width <= _MAX_WIDTH or len(out) % width or len(frame) < 1 + 4 * width:
            raise FormatError(f"a frame of {len(frame)} bytes is not one of {width} planes for {len(out)} bytes")
        lengths = struct.unpack_from(f"<{width}I", frame, 1)
        count, at = len(out) // width, 1 + 4 * width
        if at + sum(lengths) != len(frame):
            raise FormatError(f"planes of {', '.join(map(str, lengths))} bytes are not a frame of {len(frame)}")
        columns = np.frombuffer(out, np.uint8).reshape(-1, width).T
        for column, length in zip(columns, lengths, strict=True):
            plane = frame[at : at + length]
            np.copyto(column, np.frombuffer(plane if length == count else _decompress(plane, count), np.uint8))
            at += length

    def _plane(self, plane: memoryview) -> memoryview:
        sample = plane[:_SAMPLE_BYTES]
        if len(_compress(sample)) > (1 - _MIN_GAIN) * len(sample):
            return plane
        packed = memoryview(_compress(plane))
        return packed if len(packed) < len(plane) else plane


def _compress(data: memoryview) -> bytes:
    # zstandard's objects are not thread-safe, so each call creates one.
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(data)


def _decompress(frame: memoryview, size: int) -> bytes:
    try:
        # zstandard allocates the size that the frame states, regardless of max_output_size: check it first.
        if zstandard.frame_content_size(frame) != size:
            raise FormatError(f"a zstd frame does not state the expected content size of {size} bytes")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{len(frame)} bytes are not a zstd frame: {error}") from None
    if len(content) != size:
        raise FormatError(f"a zstd frame holds {len(content)} bytes, but states {size}")
    return content


_BUILTIN: dict[str, type[Codec]] = {codec.name: codec for codec in (PlainCodec, ZstdCodec, ZstdPlanesCodec)}


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
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name) if name != "raw" else ():
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
    return sorted({*_BUILTIN, *(found.name for found in entry_points(group=ENTRY_POINT_GROUP))} - {"raw"})
