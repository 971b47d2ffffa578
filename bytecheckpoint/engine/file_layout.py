"""How a data file is laid out: all that is known of it before there are bytes, and good for every save of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry import Box
from ..planners import layout
from ..safetensors_file import HeaderEntry, build_header, shard_name
from ..shards import Shard
from ..tables import Int64

__all__ = ["FileLayout", "data_key", "lay_out_file"]


@dataclass(frozen=True, eq=False)
class FileLayout:
    """A safetensors file of the shards ``rows`` of what a rank holds, in this order. ``head`` is its header, padded;
    ``offsets`` count bytes from there."""

    section: str
    rows: list[int]
    head: bytes
    offsets: list[int]
    nbytes: list[int]


def data_key(attempt: str, section: str, rank: int, kind: str) -> str:
    """Where the file of this kind (as in ``FileTable``) is stored. A rank has one of each kind in each section."""
    name = f"{attempt}/{section}-{rank:05d}"
    return f"{name}.safetensors" if kind == "tensors" else f"{name}{'.rank' if kind == 'rank_values' else ''}.msgpack"


def lay_out_file(section: str, rows: Int64, shards: Sequence[Shard], metadata: dict[str, str]) -> FileLayout:
    """The layout of a file that holds ``shards``, which are those at ``rows`` of what a rank holds, one by one."""
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
    offsets, _ = layout(np.array(nbytes, np.int64))
    return FileLayout(section, rows.tolist(), build_header(entries, metadata), offsets.tolist(), nbytes)
