"""Describe safetensors files that hold whole tensors as a manifest, as if one process had saved them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..format.manifest import FileTable, Manifest, SectionInfo
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.tables import BoxTable, TensorTable

__all__ = ["TensorFile", "whole_tensor_manifest"]


@dataclass(frozen=True, eq=False)
class TensorFile:
    """One safetensors file. ``tensors`` lists names, metas and offsets from the end of the head, in file order.

    ``checksums`` are those of the tensors' chunks, in file order.
    """

    key: str
    size: int
    head_length: int
    head_checksum: int
    tensors: Sequence[tuple[str, BasicMeta, int]]
    checksums: npt.NDArray[np.uint64]


def whole_tensor_manifest(
    section: str,
    files: Sequence[TensorFile],
    *,
    chunk_size: int,
    step: int | None = None,
    created: str = "",
    attempt: str = "",
    library_version: str = "",
) -> Manifest:
    """Return a manifest whose ``section`` consists of the tensors of ``files``."""
    count = len(files)
    tensors = [(file, name, meta, offset) for file in range(count) for name, meta, offset in files[file].tensors]
    none = np.empty(0, np.int64)
    return Manifest.assemble(
        library_version=library_version,
        step=step,
        created=created,
        world_size=1,
        attempt=attempt,
        metadata={},
        sections=[SectionInfo(section, "module")],
        files=FileTable(
            name=[file.key for file in files],
            size=np.array([file.size for file in files], np.int64),
            section=np.zeros(count, np.int64),
            rank=np.zeros(count, np.int64),
            kind=["tensors"] * count,
            head_length=np.array([file.head_length for file in files], np.int64),
            head_checksum=np.array([file.head_checksum for file in files], np.uint64),
            chunk_size=np.full(count, chunk_size, np.int64),
            codec=["raw"] * count,
        ),
        tensors=TensorTable.build([(section, name, meta) for _, name, meta, _ in tensors])
        if tensors
        else TensorTable([], [section], none, none, none, none),
        scope=np.full(len(tensors), -1, np.int64),
        shards=BoxTable.build([(row, Box.whole(meta.shape)) for row, (_, _, meta, _) in enumerate(tensors)]),
        shard_file=np.array([file for file, _, _, _ in tensors], np.int64),
        shard_offset=np.array([offset for _, _, _, offset in tensors], np.int64),
        checksums=np.concatenate([np.empty(0, np.uint64), *(file.checksums for file in files)]),
        aliases=[],
    )
