"""Incremental saves: find the older checkpoint, the *base*, and what it has of the files that each rank writes.

Rank 0 chooses the base, and sends each rank the checksums and places of the chunks in the base's files of that rank. A
file with the same layout then refers to the chunks that are equal; any other file is written completely. References are
never chains: where the base itself refers to an older file, so does the new checkpoint. All of these files are objects
of the root (``engine.objects``).

A file is kept as a whole. So that the space stays bounded, a save does not refer to a file of which its base needs less
than half: what is still needed of that file is written again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ..checkpoint.discovery import find_newest
from ..checkpoint.lease import holder_of
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import decode_manifest, read_manifest_bytes
from ..checkpoint.sweep import missing_files, root_of
from ..codecs import PlainCodec
from ..control.base import Operation
from ..engine.checksums import chunk_bounds
from ..engine.files import BaseChunks, FileImage, FileLayout, data_key
from ..engine.objects import attempts_of, files_of, objects_next_to
from ..engine.reading.stored_files import damaged_files
from ..errors import CheckpointError, StorageError, UsageError
from ..format.checksums import checksum_column, checksum_of
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import MANIFEST_KEY, MANIFEST_TRAILER
from ..format.manifest.files import ReferenceTable, encoded_head
from ..storage_backends import folder_name, open_like, parent_url
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from ..tensors.tables import ragged_positions
from .engine import LastCommit, SharedSaves
from .options import AUTO, SaveRequest

MAX_ATTEMPTS = 32
"""Attempts to whose files a new checkpoint may refer: each save lists each of them twice."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Base:
    """The base of a save, on rank 0.

    Attributes:
        manifest: The base's manifest.
        files: The files to which the new checkpoint may refer: the base's own, and then those to which it refers.
        is_usable: Which of them it does refer to.
    """

    manifest: Manifest
    files: ReferenceTable
    is_usable: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, manifest: Manifest, damaged: Collection[str]) -> Base:
        """``damaged`` are names of files to which nothing may refer any more."""
        found = files_of(manifest)
        size, frames = np.fromiter(found.values(), np.int64, len(found)), manifest.files.frames
        needed = size.copy()
        if frames is not None and frames.references.name:
            shared = np.flatnonzero(frames.source)
            row, head = frames.source[shared] - 1, np.zeros(len(frames.references.name), np.int64)
            # A file has the same layout, and so the same head, as the one that refers to it.
            referrer = np.searchsorted(frames.starts, shared, side="right") - 1
            np.maximum.at(head, row, manifest.files.head_length[referrer])
            needed[len(manifest.files) :] = head + np.bincount(row, frames.length[shared]).astype(np.int64)
        is_usable = (2 * needed >= size) & np.array([name not in damaged for name in found], bool)
        return cls(manifest, ReferenceTable([*found], size), is_usable)

    def message(self, rank: int) -> bytes:
        """Return what ``BaseShare`` needs to know on a rank."""
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
        source = np.where(self.is_usable[source - 1], source, 0)
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

    def apply(self, images: Sequence[FileImage], layouts: Sequence[FileLayout], chunk_size: int, rank: int) -> None:
        """Refer the images of tensor files, which come first and have these layouts, to the base."""
        for image, layout in zip(images, layouts, strict=False):  # files of values have no layout
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
        is_usable = (source > 0) & ((length == end - begin) | (codec == image.codec))
        return BaseChunks(checksum, length, frame_checksum, source, offset, is_usable)


@dataclass(frozen=True, eq=False)
class Choice:
    """What rank 0 has chosen for an incremental save.

    Attributes:
        is_shared: Whether the files become objects of the root. If not, the checkpoint is like any other.
        base: The base; None if everything is written.
        remark: Why everything is written.
    """

    is_shared: bool
    base: Base | None = None
    remark: str = ""


def find_base(
    saves: SharedSaves, path: StorageBackend, options: SaveRequest, attempt: str, damaged: Collection[str]
) -> Choice:
    """Choose the base of a save to ``path``, on rank 0. With a tier, this asks the store nothing.

    Raises:
        UsageError: The base is not in the same folder as the path of the save.
        CheckpointError: ``options.base`` is a path, and no checkpoint can be read there.
        StorageError: The store does not answer.
    """
    if not folder_name(path):
        return Choice(False, remark="the path has no parent folder, whose objects it could share")
    if options.tier is None and not _is_writable(path):
        return Choice(False, remark="the root, or its folder of objects, belongs to somebody else")
    named = None if options.base == AUTO else _named_base(path, str(options.base))
    last = saves.begin(attempt)
    if options.tier is not None:
        # Only what this process has uploaded is certainly there.
        is_last = last is not None and last.parent == parent_url(path) and (named is None or last.url == named.url)
        found = last if is_last else None
    elif not options.job and holder_of(root_of(path)) is not None:
        return Choice(False, remark="another job holds the lease of the root, and removes its objects")
    else:
        found = _newest(last, path) if named is None else _read(named)
    if found is None:
        return Choice(True, remark="there is no earlier incremental checkpoint that it could refer to")
    name, manifest = folder_name(open_like(path, found.url)), found.manifest
    if not manifest.is_shared:
        return Choice(True, remark=f"{name} was not saved incrementally")
    if len(attempts_of(manifest)) > MAX_ATTEMPTS:
        return Choice(True, remark=f"{name} needs the files of more than {MAX_ATTEMPTS} saves")
    if options.tier is None:
        saves.refer(attempt, manifest)
        try:
            missing = sorted(missing_files(open_like(path, found.url), manifest))
        except StorageError as error:
            if error.is_late:
                raise
            return Choice(True, remark=f"the files of {name} cannot be listed: {error}")
        if missing:
            return Choice(True, remark=f"{len(missing)} files of {name} are missing or truncated, such as {missing[0]}")
    base = Base.of(manifest, damaged)
    if not base.is_usable.any():
        return Choice(True, remark=f"the files of {name} were found damaged")
    return Choice(True, base)


def gather_damaged(op: Operation) -> set[str]:
    """Return on rank 0 the names of the files that any rank has found damaged. All ranks call it."""
    received = op.gather("damaged", msgpack.packb(damaged_files()))
    return set().union(*map(msgpack.unpackb, received or ()))


def share_base(op: Operation, choice: Choice | None) -> tuple[BaseShare | None, str]:
    """Send each rank what the base has of its files, None if nothing is shared, and the remark. All ranks call it.

    Only rank 0 passes its choice.
    """
    messages = None
    if choice is not None:
        base = choice.base
        shares = [b"" if base is None else base.message(rank) for rank in range(op.world_size)]
        messages = [msgpack.packb([choice.is_shared, share, choice.remark]) for share in shares]
    is_shared, share, remark = msgpack.unpackb(op.scatter("base", messages))
    files = {name: described for name, *described in msgpack.unpackb(share)} if share else {}
    return (BaseShare(files) if is_shared else None), remark


def _is_writable(path: StorageBackend) -> bool:
    """Whether this process may add to the root and its objects; it may turn out later that it may not."""
    objects = objects_next_to(path)
    if not isinstance(objects, LocalBackend):
        return True
    folders = (os.path.dirname(objects.url), objects.url)
    return all(os.access(folder, os.W_OK | os.X_OK) for folder in folders if os.path.isdir(folder))


def _named_base(path: StorageBackend, url: str) -> StorageBackend:
    """Return the backend of the checkpoint that the caller names as the base."""
    base = open_like(path, url)
    if not folder_name(base) or root_of(base).url != root_of(path).url:
        raise UsageError(
            f"the base {base.display_url} and the checkpoint {path.display_url} must be in the same folder, because "
            f"they share its objects"
        )
    return base


def _newest(last: LastCommit | None, path: StorageBackend) -> LastCommit | None:
    """Return the newest checkpoint in the parent of the path; None if there is none.

    Usually this process has committed it, and no manifest is read.
    """
    parent = parent_url(path)
    try:
        # One in another store may need other options, so it is not even opened.
        if last is not None and last.parent == parent and _is_current(open_like(path, last.url), last):
            return last
        location = Location(parent, storage_options=path.options)
        newest = find_newest(location, allow_fresh=True, deadline_s=path.deadline_s)
        return None if newest is None else _read(newest.backend)
    except (CheckpointError, UsageError) as error:
        _log.info("%s: no base, everything is written: %s", path.display_url, error)
        return None


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
