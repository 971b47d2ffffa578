"""Build manifests without data files, for tests of code that reads manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bytecheckpoint.format.checksums import CHECKSUM_BYTES, Checksums, checksum_column
from bytecheckpoint.format.manifest.document import Manifest, SectionInfo
from bytecheckpoint.format.manifest.files import FileTable
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

__all__ = ["make_manifest"]


def make_manifest(
    tensors: Sequence[tuple[str, str, BasicMeta, Sequence[Box]]],
    *,
    ranks: int = 1,
    chunk_size: int = 64,
    head_length: int = 4096,
    aliases: Sequence[tuple[str, str]] = (),
    metadata: Mapping[str, Any] | None = None,
    scope: Mapping[str, int] | None = None,
    attempt: str = "attempt-0",
) -> Manifest:
    """Build a manifest of ``(section, fqn, meta, boxes)`` rows.

    The manifest is valid if the boxes of each row tile its tensor. Shards are assigned to ``ranks`` in turn, and each
    section has one file for each rank that has a shard of it. Checksums count from 1 in the order of the shards.
    ``scope`` maps the full names of per-rank tensors to their ranks.
    """
    table = TensorTable.build([(section, fqn, meta) for section, fqn, meta, _ in tensors])
    shards = BoxTable.build([(row, box) for row, (_, _, _, boxes) in enumerate(tensors) for box in boxes])
    files: dict[tuple[int, int], int] = {}
    filled: list[int] = []
    shard_file: list[int] = []
    shard_offset: list[int] = []
    for row, nbytes in enumerate(shards.nbytes(table).tolist()):
        file = files.setdefault((int(table.section[shards.tensor[row]]), row % ranks), len(files))
        filled.extend([0] * (file + 1 - len(filled)))
        shard_file.append(file)
        shard_offset.append(filled[file])
        filled[file] += nbytes
    chunks = sum(-(-n // chunk_size) for n in shards.nbytes(table).tolist())
    return Manifest(
        library_version="0.0.0",
        step=7,
        created="2025-01-31T23:59:59.000001Z",
        world_size=max(ranks, 1 + max((scope or {}).values(), default=0)),
        attempt=attempt,
        metadata=dict(metadata or {}),
        sections=[SectionInfo(name, "tree") for name in table.sections],
        files=FileTable(
            [f"{attempt}/{table.sections[section]}-{rank:05d}.safetensors" for section, rank in files],
            np.array(filled, np.int64) + head_length,
            np.array([section for section, _ in files], np.int64),
            np.array([rank for _, rank in files], np.int64),
            ["tensors"] * len(files),
            np.full(len(files), head_length, np.int64),
            _counted(0, len(files)),
            np.full(len(files), chunk_size, np.int64),
            ["raw"] * len(files),
        ),
        tensors=table,
        scope=np.array([(scope or {}).get(name, -1) for name in table.names], np.int64),
        shards=shards,
        shard_file=np.array(shard_file, np.int64),
        shard_offset=np.array(shard_offset, np.int64),
        checksums=_counted(1, chunks),
        aliases=list(aliases),
    ).in_order()


def _counted(first: int, count: int) -> Checksums:
    return checksum_column(number.to_bytes(CHECKSUM_BYTES, "big") for number in range(first, first + count))
