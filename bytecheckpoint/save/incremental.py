"""Incremental saves: find the older checkpoint, the *base*, and what it has of the files that each rank writes.

Rank 0 chooses the base, pins what it may refer to (``checkpoint.references``), and sends each rank the checksums and
places of the chunks in the base's files of that rank. A file with the same layout then refers to the chunks that are
equal; any other file is written completely. References are never chains: where the base itself refers to an older file,
so does the new checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from ..checkpoint import references
from ..checkpoint.discovery import find_newest
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import decode_manifest, read_manifest_bytes, rest_of_deadline
from ..codecs import PlainCodec
from ..control.base import Operation
from ..engine.checksums import chunk_bounds
from ..engine.files import BaseChunks, FileImage, FileLayout, data_key
from ..errors import CheckpointError, StorageError, UsageError
from ..format.checksums import checksum_column, checksum_of
from ..format.manifest import (
    MANIFEST_KEY,
    MANIFEST_TRAILER,
    PARENT,
    Manifest,
    ReferenceTable,
    encoded_head,
    split_reference,
)
from ..storage_backends import folder_name, open_like, open_sibling, parent_url
from ..storage_backends.base import StorageBackend
from ..tensors.tables import ragged_positions
from .engine import LastCommit, SaveEngine
from .options import AUTO, SaveRequest

__all__ = ["MAX_FOLDERS", "Base", "BaseShare", "find_base", "share_base"]

MAX_FOLDERS = 32
"""Folders with files that a new checkpoint may refer to: each of them costs a put, a look and a thread."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Base:
    """The base of a save, on rank 0.

    Attributes:
        manifest: The base's manifest.
        files: The files to which the new checkpoint may refer, under its names for them: the base's own, and then
            those to which the base refers.
        older: The attempts that these files belong to, by folder; all of these folders are pinned.
    """

    manifest: Manifest
    files: ReferenceTable
    older: Mapping[str, set[str]]

    @classmethod
    def of(cls, manifest: Manifest, base_folder: str, own_folder: str) -> Base:
        """``base_folder`` is empty if the base is at the path of the save."""
        names = [
            _seen_from(own_folder, base_folder, name) for name in (*manifest.files.name, *manifest.references.name)
        ]
        older: dict[str, set[str]] = {}
        for name in names:
            folder, key = split_reference(name)
            older.setdefault(folder, set()).add(key.partition("/")[0])
        size = np.concatenate([manifest.files.size, manifest.references.size])
        return cls(manifest, ReferenceTable(names, size), older)

    def message(self, rank: int) -> bytes:
        """Return what ``BaseShare.unpack`` needs on a rank."""
        files = self.manifest.files
        rows = np.flatnonzero(files.rank == rank).tolist()
        packed: bytes = msgpack.packb([self._file(row) for row in rows if files.kind[row] == "tensors"])
        return packed

    def _file(self, row: int) -> list[Any]:
        manifest, files = self.manifest, self.manifest.files
        shards = manifest.shards_in(row)
        shards = shards[manifest.shard_nbytes[shards] > 0]
        first = manifest.checksum_starts[shards]
        chunks = ragged_positions(first, manifest.checksum_starts[shards + 1] - first)
        checksum = frame_checksum = manifest.checksums[chunks]
        if files.codec[row] == "raw":
            begin = files.head_length[row] + manifest.shard_offset[shards]
            offset, stop = chunk_bounds(begin, manifest.shard_nbytes[shards], int(files.chunk_size[row]))
            length, source = stop - offset, np.full(len(offset), row + 1)
        else:
            frames = files.frames
            assert frames is not None
            here = frames.rows(row)
            offset, length, frame_checksum = frames.position[here], frames.length[here], manifest.frame_checksums[here]
            source = np.where(frames.source[here] == 0, row + 1, len(files) + frames.source[here])
        return [
            manifest.section_name(int(files.section[row])),
            files.codec[row],
            int(files.head_length[row]),
            files.head_checksum[row].item(),
            int(files.chunk_size[row]),
            checksum.tobytes(),
            frame_checksum.tobytes(),
            *(column.astype("<u8").tobytes() for column in (length, source, offset)),
        ]


@dataclass(frozen=True, eq=False)
class BaseShare:
    """What the base has of one rank's files, by section: their description, and the columns of ``BaseChunks``."""

    files: Mapping[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def unpack(cls, message: bytes) -> BaseShare:
        """Unpack what rank 0 has sent; nothing if there is no base."""
        return cls({name: described for name, *described in msgpack.unpackb(message)} if message else {})

    def apply(self, images: Sequence[FileImage], layouts: Sequence[FileLayout], chunk_size: int, rank: int) -> None:
        """Refer the images of tensor files, which have these layouts, to the base."""
        for image, layout in zip(images, layouts):
            base = self._chunks(image, layout, chunk_size)
            if base is not None:
                image.base = base
                if image.codec == "raw":
                    image.codec, image.head = PlainCodec.name, encoded_head(image.head)
                    attempt = image.key.partition("/")[0]
                    image.key = data_key(attempt, image.section, rank, image.kind, image.codec)

    def _chunks(self, image: FileImage, layout: FileLayout, chunk_size: int) -> BaseChunks | None:
        """Return the base's chunks of a file; None unless the base's file has the same layout."""
        codec, head_length, head_checksum, base_chunk_size, *columns = self.files.get(image.section, [None] * 4)
        heads = map(checksum_of, (layout.head, encoded_head(layout.head)))
        if (head_length, base_chunk_size) != (len(layout.head), chunk_size) or head_checksum not in heads:
            return None
        checksum, frame_checksum = map(checksum_column, columns[:2])
        length, source, offset = (np.frombuffer(one, "<u8").astype(np.int64) for one in columns[2:])
        begin, end = chunk_bounds(np.array(layout.offsets, np.int64), np.array(layout.nbytes, np.int64), chunk_size)
        if len(checksum) != len(begin):
            return None
        # An encoded frame is decoded with the codec of the file that refers to it.
        is_usable = (length == end - begin) | (codec == image.codec)
        return BaseChunks(checksum, length, frame_checksum, source, offset, is_usable)


def find_base(engine: SaveEngine, backend: StorageBackend, options: SaveRequest, attempt: str) -> Base | None:
    """Choose the base of a save on rank 0, and pin it. Returns None if everything must be written.

    Raises:
        UsageError: The base is not in the same folder as the path of the save.
        CheckpointError: ``options.base`` is a path, and no checkpoint can be read there.
        StorageError: A pin could not be put.
    """
    own, begun = folder_name(backend), time.monotonic()
    found = _named_base(backend, options) if options.base != AUTO else _newest(engine, backend)
    if found is None or not found.manifest.is_shared:
        return None
    folder = folder_name(open_like(backend, found.url))
    base = Base.of(found.manifest, "" if folder == own else folder, own)
    if len(base.older) > MAX_FOLDERS:
        _log.info(
            "%s: the base %s has files in %d folders; everything is written",
            backend.display_url,
            folder,
            len(base.older),
        )
        return None
    try:
        references.pin(backend, attempt, base.older, for_upload=options.tier is not None)
        if _is_current(open_like(backend, found.url), found):
            return base
    except BaseException:
        with rest_of_deadline(backend, begun):
            references.settle(backend, attempt, base.older, ())
        raise
    _log.info("%s: the base %s was removed or replaced; everything is written", backend.display_url, folder)
    references.settle(backend, attempt, base.older, ())
    return None


def share_base(op: Operation, base: Base | None) -> BaseShare:
    """Send each rank what the base has of its files; only rank 0 passes the base. All ranks call it."""
    messages = [b""] * op.world_size if base is None else [base.message(rank) for rank in range(op.world_size)]
    return BaseShare.unpack(op.scatter("base", messages if op.rank == 0 else None))


def _named_base(backend: StorageBackend, options: SaveRequest) -> LastCommit:
    """Return the checkpoint that the caller names as the base."""
    base = open_like(backend, str(options.base))
    folder = folder_name(base)
    is_sibling = folder and folder_name(backend) and _sibling(base, folder).url == _sibling(backend, folder).url
    if not is_sibling and base.url != backend.url:
        raise UsageError(
            f"the base {base.display_url} and the checkpoint {backend.display_url} must be in the same folder, because "
            f"a checkpoint refers to older files by relative names"
        )
    return _read(base)


def _newest(engine: SaveEngine, backend: StorageBackend) -> LastCommit | None:
    """Return the newest checkpoint in the parent of the path, or at the path; None if there is none.

    Usually this process has committed it, and nothing is read.
    """
    own, last = folder_name(backend), engine.last_commit
    try:
        # One in another store may need other options, so it is not even opened.
        if (
            last is not None
            and (last.parent == parent_url(backend) if own else last.url == backend.url)
            and _is_current(open_like(backend, last.url), last)
        ):
            return last
        if not own:
            return _read(backend)
        parent = Location(parent_url(backend), storage_options=backend.options)
        newest = find_newest(parent, allow_fresh=True, deadline_s=backend.deadline_s)
        return None if newest is None else _read(newest.backend)
    except (CheckpointError, UsageError) as error:
        _log.info("%s: no base, everything is written: %s", backend.display_url, error)
        return None


def _sibling(backend: StorageBackend, folder: str) -> StorageBackend:
    return open_sibling(backend, folder) if folder else backend


def _read(backend: StorageBackend) -> LastCommit:
    data = read_manifest_bytes(backend)
    return LastCommit.of(backend, decode_manifest(data, backend.url), data)


def _is_current(backend: StorageBackend, found: LastCommit) -> bool:
    """Whether this manifest is still in place. Reads its checksum only. Raises if the store does not answer."""
    trailer = bytearray(MANIFEST_TRAILER)
    try:
        backend.read_into(MANIFEST_KEY, found.size - MANIFEST_TRAILER, trailer)
    except StorageError as error:
        if error.is_late:
            raise
        return False  # it is missing, or shorter
    return bytes(trailer) == found.trailer


def _seen_from(own: str, base: str, name: str) -> str:
    """Return the name in the folder ``own`` of a file that has this name in ``base``, a sibling or itself."""
    folder, key = split_reference(name)
    folder = folder or base
    return key if folder in ("", own) else f"{PARENT}{folder}/{key}"
