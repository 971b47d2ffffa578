"""What is known of a tensor, a shard of it, and the bytes that hold it: BasicMeta, ShardMeta, ByteMeta.

These are ByteCheckpoint's three kinds of metadata (NSDI'25, section 3.2), as small immutable values. The manifest
keeps the same facts as columns; these are what single look-ups return.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .dtypes import DType
from .geometry import Box

__all__ = ["BasicMeta", "ByteMeta", "Path", "ShardMeta"]

Path = tuple["str | int", ...]
"""Where a value stands in its section's tree: one component per nested mapping key or list index."""


class BasicMeta(NamedTuple):
    """A tensor as a whole: its element type and global shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ShardMeta:
    """One shard: an n-D box of the tensor named ``fqn``, in global coordinates."""

    fqn: str
    box: Box


@dataclass(frozen=True)
class ByteMeta:
    """Where a shard's bytes lie: row-major, ``length`` bytes at ``offset`` of ``file``.

    ``checksums`` are xxh3-64 values of consecutive pieces of ``chunk_size`` bytes, the last one shorter.
    """

    file: str
    offset: int
    length: int
    chunk_size: int
    checksums: tuple[int, ...]
    codec: str = "raw"
