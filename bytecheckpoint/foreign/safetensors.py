"""Open folders of safetensors files as if they were checkpoints. Their files have no checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..checkpoint.checkpoint import Checkpoint
from ..engine.checksums import chunk_size_for
from ..engine.resources import IOEngine
from ..format.manifest import FileTable, Manifest, SectionInfo
from ..format.safetensors import SafetensorsHeader
from ..tensors.geometry import Box
from ..tensors.tables import BoxTable, TensorTable
from .safetensors_folder import SafetensorsFolder, meta_of

__all__ = ["MODEL_SECTION", "ForeignCheckpoint", "describe_folder", "describe_headers"]

MODEL_SECTION = "model"
"""The section that the tensors of another library's files form."""


class ForeignCheckpoint(Checkpoint):
    """The tensors of another library's files, in the section ``model``. Nothing in them is checked."""

    has_checksums = False

    def __init__(
        self, folder: SafetensorsFolder, engine: IOEngine, *, reopen: Callable[[], Checkpoint] | None = None
    ) -> None:
        """Create a handle on the files of ``folder``."""
        manifest = describe_folder(folder, MODEL_SECTION)
        super().__init__(folder.backend, manifest, engine, verify=False, reopen=reopen)


def describe_folder(folder: SafetensorsFolder, section: str, names: Mapping[str, str] | None = None) -> Manifest:
    """Return a manifest as a save in one process would have written it, but with meaningless checksums.

    ``names`` gives each tensor's name inside the section, if that is not its name in the files. Raises
    ``UnsupportedTensorError`` for a dtype that torch does not have.
    """
    return describe_headers(folder.headers, folder.backend.url, section, names)


def describe_headers(
    headers_by_key: Mapping[str, SafetensorsHeader], url: str, section: str, names: Mapping[str, str] | None = None
) -> Manifest:
    """Like ``describe_folder``, for the headers of the files in the folder ``url``."""
    headers = list(headers_by_key.values())
    tensors = [
        (
            file,
            record.begin,
            names[record.name] if names else record.name,
            meta_of(record, f"{url}/{key}"),
        )
        for file, (key, header) in enumerate(headers_by_key.items())
        for record in header.entries
    ]
    chunk_size = chunk_size_for(sum(record.end - record.begin for header in headers for record in header.entries))
    head_length = np.array([header.data_start for header in headers], np.int64)
    data_length = np.array([max((record.end for record in header.entries), default=0) for header in headers], np.int64)
    none, zeros = np.empty(0, np.int64), np.zeros(len(headers), np.int64)
    return Manifest.assemble(
        library_version="",
        step=None,
        created="",
        world_size=1,
        attempt="",
        metadata={},
        sections=[SectionInfo(section, "module")],
        files=FileTable(
            name=list(headers_by_key),
            size=head_length + data_length,
            section=zeros,
            rank=zeros,
            kind=["tensors"] * len(headers),
            head_length=head_length,
            head_checksum=zeros.astype(np.uint64),
            chunk_size=zeros + chunk_size,
            codec=["raw"] * len(headers),
        ),
        tensors=TensorTable.build([(section, name, meta) for _, _, name, meta in tensors])
        if tensors
        else TensorTable([], [section], none, none, none, none),
        scope=np.full(len(tensors), -1, np.int64),
        shards=BoxTable.build([(row, Box.whole(meta.shape)) for row, (_, _, _, meta) in enumerate(tensors)]),
        shard_file=np.array([file for file, _, _, _ in tensors], np.int64),
        shard_offset=np.array([begin for _, begin, _, _ in tensors], np.int64),
        checksums=np.zeros(sum(-(-meta.nbytes // chunk_size) for _, _, _, meta in tensors), np.uint64),
        aliases=[],
    )
