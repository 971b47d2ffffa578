"""Copying a checkpoint to another store, and removing one. The manifest is the last to come and the first to go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .engine.commit import commit, read_manifest, remove_files
from .engine.files import chunk_checksums
from .engine.reader import read_stored_file
from .errors import CommitUnknownError, CorruptionError, KeyNotFoundError, StorageError
from .manifest import MANIFEST_KEY
from .rewriting import PIECE, Progress, refuse_checkpoint
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
    try:
        for row, key in enumerate(manifest.files.name):
            with target.create(key, int(manifest.files.size[row])) as writer:
                at = 0
                for piece in _verified(checkpoint, row):
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


def _verified(checkpoint: Checkpoint, row: int) -> Iterator[memoryview]:
    """The bytes of file ``row`` from its first to its last, each piece checked before it is handed out. A piece is
    good until the next one is asked for."""
    manifest, backend = checkpoint.manifest, checkpoint.backend
    yield memoryview(read_stored_file(backend, manifest, row, head_only=False))
    rows = np.flatnonzero(manifest.shard_file == row)
    chunk = int(manifest.files.chunk_size[row])
    piece = max(PIECE - PIECE % chunk, chunk)
    buffer = memoryview(bytearray(min(piece, int(manifest.files.size[row]))))
    for shard in rows[np.argsort(manifest.shard_offset[rows], kind="stable")].tolist():
        at = manifest.byte_meta(shard)
        for start in range(0, at.length, piece):
            part = buffer[: min(piece, at.length - start)]
            where = f"tensor {manifest.tensors.names[int(manifest.shards.tensor[shard])]}, bytes [{at.offset + start}, "
            where = f"{backend.url}/{at.file}: {where}{at.offset + start + len(part)})"
            try:
                backend.read_into(at.file, at.offset + start, part)
            except KeyNotFoundError as error:
                raise CorruptionError(f"{where}: file is missing; restore it, or copy another checkpoint") from error
            except StorageError as error:
                raise CorruptionError(f"{where}: cannot be read: {error}") from error
            first = start // chunk
            if tuple(chunk_checksums(part, chunk)) != at.checksums[first : first + -(-len(part) // chunk)]:
                raise CorruptionError(
                    f"{where}: checksum mismatch: stored data were changed after they were written; restore the file "
                    f"or copy another checkpoint"
                )
            yield part
