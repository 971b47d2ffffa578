"""Metadata of a tensor, of a shard, and of the bytes that store it: BasicMeta, ShardMeta, ByteMeta.

These are ByteCheckpoint's three kinds of metadata (NSDI'25, section 3.2) as small immutable values. The manifest stores
the same facts as columns; single look-ups return these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .dtypes import DType
from .geometry import Box

Path = tuple["str | int", ...]
"""The position of a value in its section's tree: one component per nested mapping key or list index."""


class BasicMeta(NamedTuple):
    """The element type and the global shape of a tensor. Immutable and hashable.

    Attributes:
        dtype: The element type.
        shape: The global shape; empty for a 0-d tensor.
    """

    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the global tensor in bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ShardMeta:
    """A box of a tensor.

    Attributes:
        fqn: The tensor's name.
        box: The box in global coordinates.
    """

    fqn: str
    box: Box


@dataclass(frozen=True)
class ByteMeta:
    """Where a shard's row-major bytes are stored.

    Attributes:
        file: The file, relative to the checkpoint.
        offset: The first byte in the file.
        length: The number of bytes in the file.
        chunk_size: The bytes that one checksum covers; the last chunk may be shorter.
        checksums: The xxh3-64 values of consecutive chunks.
        codec: The name of the codec.
    """

    file: str
    offset: int
    length: int
    chunk_size: int
    checksums: tuple[int, ...]
    codec: str = "raw"
