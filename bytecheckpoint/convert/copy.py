"""Copy a checkpoint to another store, or remove one. A copy writes the manifest last; a removal deletes it first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifest_file import commit, read_manifest, remove_files
from ..engine.reading.reader import Reader
from ..engine.reading.stored_files import read_stored_file
from ..errors import UsageError
from ..format.manifest import MANIFEST_KEY
from ..storage_backends import open_backend
from .rewriter import Progress, cleanup_on_failure, refuse_checkpoint

__all__ = ["CopyReport", "RemoveReport", "copy", "remove"]


@dataclass(frozen=True)
class CopyReport:
    """The result of ``copy``.

    Attributes:
        url: URL of the copy.
        files: Number of data files.
        size: Bytes of all data files.
    """

    url: str
    files: int
    size: int


@dataclass(frozen=True)
class RemoveReport:
    """The result of ``remove``.

    Attributes:
        url: URL of the removed checkpoint.
        files: Number of removed data files.
        size: Bytes of all removed data files.
        left: Keys that remain, because they were not part of the checkpoint.
    """

    url: str
    files: int
    size: int
    left: tuple[str, ...]


def copy(
    checkpoint: Checkpoint,
    target_url: str,
    *,
    progress: Progress = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyReport:
    """Copy a checkpoint exactly, and check every byte on the way. Holds a few MiB at a time.

    The manifest is written when all files are durable. After a failure nothing remains at the target.

    Args:
        checkpoint: The checkpoint to copy.
        target_url: Where to put the copy, on any store.
        progress: Called with the number of bytes copied since the last call.
        storage_options: Options for the target's storage backend.

    Returns:
        A report.

    Raises:
        KeyExistsError: The target already holds a checkpoint.
        UsageError: The checkpoint was opened with rules.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, checkpoint.url)
    if checkpoint.index.views is not None:
        raise UsageError(f"{checkpoint.url} was opened with rules; use reshard, or copy it without rules")
    manifest = checkpoint.manifest
    done: list[str] = []
    reader = checkpoint.checked_reader()
    with cleanup_on_failure(lambda: remove_files(target, done)):
        for row, key in enumerate(manifest.files.name):
            with target.create(key, int(manifest.files.size[row])) as writer:
                at = 0
                for piece in _verified_pieces(reader, row):
                    writer.write(at, piece)
                    at += len(piece)
                    progress(len(piece))
                writer.complete()
            done.append(key)
        commit(target, manifest, may_replace=False)
    return CopyReport(target.url, len(manifest.files), manifest.file_bytes)


def remove(url: str, *, storage_options: Mapping[str, Any] | None = None) -> RemoveReport:
    """Remove a checkpoint: first its manifest, so that an incomplete checkpoint is never visible, then its files.

    Only the files that the manifest names are removed.

    Args:
        url: URL of the checkpoint.
        storage_options: Options for the storage backend.

    Returns:
        A report.

    Raises:
        CheckpointError: There is no checkpoint at ``url``. Nothing was removed.
        StorageError: The store failed. Files may remain.
    """
    backend = open_backend(url, **dict(storage_options or {}))
    manifest = read_manifest(backend)
    backend.delete([MANIFEST_KEY])
    backend.delete(manifest.files.name)
    left = tuple(stat.key for stat in backend.list())
    return RemoveReport(backend.url, len(manifest.files), manifest.file_bytes, left)


def _verified_pieces(reader: Reader, file: int) -> Iterator[memoryview]:
    """Yield all bytes of one file in order, checked. A piece is valid until the next is requested."""
    manifest = reader.manifest
    yield memoryview(read_stored_file(reader.backend, manifest, file, head_only=False))
    if reader.source.is_encoded(file):
        yield from reader.stored_frames(file)
        return
    buffer = memoryview(b"")
    for row in manifest.shards_in(file).tolist():
        shard = reader.shard(row)
        for start, stop in shard.pieces():
            if len(buffer) < stop - start:
                buffer = memoryview(bytearray(stop - start))
            part = buffer[: stop - start]
            shard.fetch(start, part)
            yield part
