"""Folders of safetensors files, opened as if they were checkpoints: the same reads, from files without checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .engine.checksums import chunk_size_for
from .engine.resources import Engine
from .errors import CheckpointNotFoundError, NotACheckpointError
from .geometry import Box
from .manifest import FileTable, Manifest, SectionInfo
from .safetensors_file import SafetensorsHeader
from .safetensors_folder import SafetensorsFolder, meta_of
from .tables import BoxTable, TensorTable

__all__ = ["ForeignCheckpoint", "open_safetensors"]

_SECTION = "model"


class ForeignCheckpoint(Checkpoint):
    """Tensors of files that another library wrote, in the section ``model``. Nothing in them is checked."""

    has_checksums = False

    def __init__(self, folder: SafetensorsFolder, engine: Engine) -> None:
        super().__init__(folder.backend, _manifest(folder), engine, verify=False)


def open_safetensors(
    url: str, engine: Engine, *, storage_options: Mapping[str, Any] | None = None
) -> ForeignCheckpoint | None:
    """The folder (or file) of Hugging Face's layout at ``url``; None where there is none.

    Headers are read, and held against the index. Raises as ``SafetensorsFolder`` for files that are damaged.
    """
    try:
        folder = SafetensorsFolder(url, storage_options=storage_options)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return ForeignCheckpoint(folder, engine)


def _manifest(folder: SafetensorsFolder) -> Manifest:
    """As a save in one process would have written it, but that the checksums mean nothing."""
    headers = list(folder.headers.values())
    found = [
        (file, record, meta_of(record, f"{folder.backend.url}/{key}"))
        for file, (key, header) in enumerate(folder.headers.items())
        for record in header.entries
    ]
    chunk_size = chunk_size_for(folder.nbytes)
    chunks = sum(-(-meta.nbytes // chunk_size) for _, _, meta in found)
    return Manifest.assemble(
        library_version="",
        step=None,
        created="",
        world_size=1,
        attempt="",
        metadata={},
        sections=[SectionInfo(_SECTION, "module")],
        files=FileTable(
            name=list(folder.headers),
            size=np.array([_end(header) for header in headers], np.int64),
            section=np.zeros(len(headers), np.int64),
            rank=np.zeros(len(headers), np.int64),
            kind=["tensors"] * len(headers),
            head_length=np.array([header.data_start for header in headers], np.int64),
            head_checksum=np.zeros(len(headers), np.uint64),
            chunk_size=np.full(len(headers), chunk_size, np.int64),
            codec=["raw"] * len(headers),
        ),
        tensors=TensorTable.build([(_SECTION, record.name, meta) for _, record, meta in found]),
        scope=np.full(len(found), -1, np.int64),
        shards=BoxTable.build([(row, Box.whole(meta.shape)) for row, (_, _, meta) in enumerate(found)]),
        shard_file=np.array([file for file, _, _ in found], np.int64),
        shard_offset=np.array([record.begin for _, record, _ in found], np.int64),
        checksums=np.zeros(chunks, np.uint64),
        aliases=[],
    )


def _end(header: SafetensorsHeader) -> int:
    return header.data_start + max((record.end for record in header.entries), default=0)
