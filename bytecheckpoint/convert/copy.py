"""Copying a checkpoint to another store, and removing one. The manifest is the last to come and the first to go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .engine.reading.reader import Reader
from .engine.reading.stored_files import read_stored_file
from .engine.writing.commit import commit, read_manifest, remove_files
from .errors import CommitUnknownError
from .manifest import MANIFEST_KEY
from .rewriting import Progress, refuse_checkpoint
from .storage_backends import open_backend

__all__ = ["CopyReport", "RemoveReport", "copy", "remove"]


@dataclass(frozen=True)
class CopyReport:
    """A copy at ``url``: the number of data files, and their bytes."""

    url: str
    files: int
    size: int


@dataclass(frozen=True)
class RemoveReport:
    """``files`` data files of ``size`` bytes are gone. ``left`` are objects that were no part of the checkpoint."""

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
    """An exact copy of ``checkpoint`` at ``target_url``, on any store, each byte checked on its way.

    Files first, manifest last: the copy appears when all of it is durable, and a failure leaves nothing behind. Holds
    a few MiB at a time. Raises ``KeyExistsError`` where a checkpoint is at the target already, ``CorruptionError``,
    ``StorageError``.
    """
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, checkpoint.url)
    manifest = checkpoint.manifest
    done: list[str] = []
    reader = checkpoint.checked_reader()
    try:
        for row, key in enumerate(manifest.files.name):
            with target.create(key, int(manifest.files.size[row])) as writer:
                at = 0
                for piece in _verified(reader, row):
                    writer.write(at, piece)
                    at += len(piece)
                    progress(len(piece))
                writer.complete()
            done.append(key)
        commit(target, manifest)
    except CommitUnknownError:
        raise
    except BaseException:
        remove_files(target, done)
        raise
    return CopyReport(target.url, len(manifest.files), manifest.file_bytes)


def remove(url: str, *, storage_options: Mapping[str, Any] | None = None) -> RemoveReport:
    """Remove the checkpoint at ``url``: its manifest first, so that at no moment half a checkpoint is to be seen.

    Only what the manifest names is removed. Raises ``CheckpointError`` and removes nothing where there is no
    checkpoint, ``StorageError`` where removing failed.
    """
    backend = open_backend(url, **dict(storage_options or {}))
    manifest = read_manifest(backend)
    backend.delete([MANIFEST_KEY])
    backend.delete(manifest.files.name)
    left = tuple(stat.key for stat in backend.list())
    return RemoveReport(backend.url, len(manifest.files), manifest.file_bytes, left)


def _verified(reader: Reader, file: int) -> Iterator[memoryview]:
    """The bytes of one file from its first to its last, each piece checked before it is handed out. A piece is good
    until the next one is asked for."""
    manifest = reader.manifest
    yield memoryview(read_stored_file(reader.backend, manifest, file, head_only=False))
    buffer = memoryview(b"")
    for row in manifest.shards_in(file).tolist():
        shard = reader.shard(row)
        for start, stop in shard.pieces():
            if len(buffer) < stop - start:
                buffer = memoryview(bytearray(stop - start))
            part = buffer[: stop - start]
            shard.fetch(start, part)
            yield part
