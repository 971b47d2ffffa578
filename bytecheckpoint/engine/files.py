"""File images: what one rank writes, byte for byte as it will be on storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from ..shards import Shard
from .file_layout import FileLayout

__all__ = ["FileImage", "tensor_image", "values_image"]


@dataclass
class FileImage:
    """One file to be written: ``head`` (padded safetensors header, or a whole values document), then the data area.

    There, ``nbytes[i]`` bytes from ``offsets[i]`` on are ``shards[i]``, in ascending order. ``shards`` is empty where
    the bytes come from elsewhere, and once they are all staged.
    """

    key: str
    section: str
    kind: str
    head: bytes
    offsets: Sequence[int] = ()
    nbytes: Sequence[int] = ()
    shards: Sequence[Shard] = ()

    @property
    def data_size(self) -> int:
        return self.offsets[-1] + self.nbytes[-1] if self.offsets else 0

    @property
    def size(self) -> int:
        return len(self.head) + self.data_size

    def head_checksum(self) -> int:
        return xxhash.xxh3_64_intdigest(self.head)

    def release_tensors(self) -> None:
        """Let go of the caller's tensors; their bytes are in staging memory."""
        self.shards = ()


def tensor_image(key: str, layout: FileLayout, shards: Sequence[Shard] = ()) -> FileImage:
    """The image of a safetensors file of this layout; ``shards`` are those of its ``rows``, if this rank has them."""
    return FileImage(key, layout.section, "tensors", layout.head, layout.offsets, layout.nbytes, shards)


def values_image(key: str, section: str, kind: str, document: bytes) -> FileImage:
    """The image of a file of plain values."""
    return FileImage(key, section, kind, document)
