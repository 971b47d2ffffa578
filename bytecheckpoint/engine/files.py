"""Lay out data files, and describe their images: the bytes of a file before it is written.

A layout depends on shapes only and serves every save of a plan; an image adds a key and the tensors of one save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ..format.safetensors import HeaderEntry, build_header, shard_name
from ..planners import consecutive_offsets
from ..tensors.geometry import Box
from ..tensors.shards import Shard
from ..tensors.tables import Int64

__all__ = ["FileImage", "FileLayout", "data_key", "lay_out_file", "tensor_image"]


@dataclass(frozen=True, eq=False)
class FileLayout:
    """The layout of a safetensors file that holds the shards ``rows`` of a rank's local plan, in this order.

    ``head`` is the padded header. ``offsets`` count bytes from the end of the header.
    """

    section: str
    rows: list[int]
    head: bytes
    offsets: list[int]
    nbytes: list[int]


@dataclass
class FileImage:
    """The content of one file: ``head`` (a padded safetensors header, or a whole values document), then tensors.

    ``shards[i]`` occupies ``nbytes[i]`` bytes at ``offsets[i]``, counted from the end of the head, in ascending order.
    ``shards`` is empty if the bytes come from elsewhere, and after all of them are staged.
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
        """Bytes after the head."""
        return self.offsets[-1] + self.nbytes[-1] if self.offsets else 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.data_size

    def head_checksum(self) -> int:
        """Return the checksum of the head that the manifest records."""
        return xxhash.xxh3_64_intdigest(self.head)

    def release_tensors(self) -> None:
        """Drop the references to the caller's tensors; their bytes are staged."""
        self.shards = ()


def data_key(attempt: str, section: str, rank: int, kind: str) -> str:
    """Return the key of a rank's file of this kind (see ``FileTable``); it has one of each kind per section."""
    name = f"{attempt}/{section}-{rank:05d}"
    return f"{name}.safetensors" if kind == "tensors" else f"{name}{'.rank' if kind == 'rank_values' else ''}.msgpack"


def lay_out_file(section: str, rows: Int64, shards: Sequence[Shard], metadata: dict[str, str]) -> FileLayout:
    """Lay out a file that holds ``shards``, which are the rows ``rows`` of a rank's local plan."""
    nbytes = [shard.box.numel * shard.meta.dtype.itemsize for shard in shards]
    entries = [
        HeaderEntry(
            name=shard_name(shard.fqn, shard.box, whole=shard.box == Box.whole(shard.meta.shape)),
            dtype=shard.meta.dtype,
            shape=shard.box.lengths,
            nbytes=size,
        )
        for shard, size in zip(shards, nbytes)
    ]
    offsets, _ = consecutive_offsets(np.array(nbytes, np.int64))
    return FileLayout(section, rows.tolist(), build_header(entries, metadata), offsets.tolist(), nbytes)


def tensor_image(key: str, layout: FileLayout, shards: Sequence[Shard] = ()) -> FileImage:
    """Return the image of a safetensors file. ``shards`` are the layout's ``rows``, if this rank holds them."""
    return FileImage(key, layout.section, "tensors", layout.head, layout.offsets, layout.nbytes, shards)
