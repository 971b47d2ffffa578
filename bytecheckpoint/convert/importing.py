"""From Hugging Face's safetensors files to a checkpoint of ours: streaming, checked, committed at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .engine.checksums import ChunkHasher, chunk_size_for
from .engine.writing.commit import commit, new_attempt, remove_attempt
from .errors import CommitUnknownError, NameCollisionError, StateError
from .geometry import Box
from .manifest import FileTable, Manifest, SectionInfo, timestamp
from .matching import Rename, renaming
from .metadata import BasicMeta
from .rewriting import PIECE, Progress, refuse_checkpoint
from .safetensors_file import HeaderEntry, build_header
from .safetensors_folder import SafetensorsFolder, meta_of
from .sections import check_state, split_rank_name
from .storage_backends import open_backend
from .storage_backends.base import StorageBackend
from .tables import BoxTable, TensorTable
from .version import HEADER_METADATA, VERSION

__all__ = ["ImportReport", "import_safetensors"]


@dataclass(frozen=True)
class ImportReport:
    """What an import committed at ``url``. ``total_size`` is the bytes of all tensors."""

    url: str
    section: str
    files: tuple[str, ...]
    tensors: int
    total_size: int


def import_safetensors(
    source_url: str,
    target_url: str,
    *,
    section: str = "model",
    step: int | None = None,
    rename: Rename | None = None,
    progress: Progress = lambda nbytes: None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Commit a checkpoint at ``target_url`` whose ``section`` holds the tensors of ``source_url`` (a folder or file).

    ``rename`` maps an imported name to the one within the section. Pieces of a few MiB are read and written; the
    checkpoint appears when all is durable, and nothing is left behind by a failure. Raises as ``SafetensorsFolder``
    does, ``KeyExistsError`` where a checkpoint is at the target already, ``UnsupportedTensorError`` for dtypes that
    torch does not have, ``StorageError``.
    """
    check_state({section: None})
    if step is not None and step < 0:
        raise StateError(f"step must not be negative: {step}")
    source = SafetensorsFolder(source_url, storage_options=source_options)
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, source.backend.url)
    names = _names(source, renaming(rename))
    attempt = new_attempt()
    try:
        written = [
            _copy_file(source, key, target, f"{attempt}/{section}-{number:05d}.safetensors", names, progress)
            for number, key in enumerate(source.headers)
        ]
        commit(target, _manifest(section, step, attempt, written, chunk_size_for(source.nbytes)))
    except CommitUnknownError:
        raise
    except BaseException:
        remove_attempt(target, attempt)
        raise
    return ImportReport(target.url, section, tuple(source.headers), len(names), source.nbytes)


@dataclass(frozen=True)
class _Written:
    """One durable file: its tensors in file order, and the checksums of their chunks."""

    key: str
    head: bytes
    tensors: list[tuple[str, BasicMeta]]
    checksums: list[int]

    @property
    def size(self) -> int:
        return len(self.head) + sum(meta.nbytes for _, meta in self.tensors)


def _names(source: SafetensorsFolder, rename: Callable[[str], str]) -> dict[str, str]:
    """The name within the section, by the name in the file."""
    names = {name: rename(name) for name in source.shapes}
    seen: dict[str, str] = {}
    for name, new in names.items():
        if new in seen:
            raise NameCollisionError(f"{seen[new]!r:.200} and {name!r:.200} would both become {new!r:.200}")
        if not new or split_rank_name(new)[1] is not None:
            raise NameCollisionError(f"{new!r:.200}: a name cannot be empty or end in @<number>; rename it")
        seen[new] = name
    return names


def _copy_file(
    source: SafetensorsFolder,
    key: str,
    target: StorageBackend,
    new_key: str,
    names: Mapping[str, str],
    progress: Progress,
) -> _Written:
    header = source.headers[key]
    tensors = [(names[record.name], meta_of(record, f"{source.backend.url}/{key}")) for record in header.entries]
    head = build_header(
        [HeaderEntry(name, meta.dtype, meta.shape, meta.nbytes) for name, meta in tensors],
        HEADER_METADATA,
    )
    hasher = ChunkHasher(chunk_size_for(source.nbytes))
    buffer = memoryview(bytearray(PIECE))
    with target.create(new_key, len(head) + sum(meta.nbytes for _, meta in tensors)) as writer:
        writer.write(0, head)
        for record in header.entries:
            for begin in range(record.begin, record.end, PIECE):
                piece = buffer[: min(PIECE, record.end - begin)]
                source.backend.read_into(key, header.data_start + begin, piece)
                writer.write(len(head) + begin, piece)
                hasher.update(piece)
                progress(len(piece))
            hasher.end_item()
        writer.complete()
    return _Written(new_key, head, tensors, hasher.checksums)


def _manifest(section: str, step: int | None, attempt: str, written: Sequence[_Written], chunk_size: int) -> Manifest:
    tensors = [(section, name, meta) for file in written for name, meta in file.tensors]
    nbytes = [[meta.nbytes for _, meta in file.tensors] for file in written]
    return Manifest.assemble(
        library_version=VERSION,
        step=step,
        created=timestamp(),
        world_size=1,
        attempt=attempt,
        metadata={},
        sections=[SectionInfo(section, "module")],
        files=FileTable(
            name=[file.key for file in written],
            size=np.array([file.size for file in written], np.int64),
            section=np.zeros(len(written), np.int64),
            rank=np.zeros(len(written), np.int64),
            kind=["tensors"] * len(written),
            head_length=np.array([len(file.head) for file in written], np.int64),
            head_checksum=np.array([xxhash.xxh3_64_intdigest(file.head) for file in written], np.uint64),
            chunk_size=np.full(len(written), chunk_size, np.int64),
            codec=["raw"] * len(written),
        ),
        tensors=TensorTable.build(tensors) if tensors else _no_tensors(section),
        scope=np.full(len(tensors), -1, np.int64),
        shards=BoxTable.build([(row, Box.whole(meta.shape)) for row, (_, _, meta) in enumerate(tensors)]),
        shard_file=np.repeat(np.arange(len(written)), [len(file.tensors) for file in written]),
        shard_offset=np.concatenate([np.cumsum([0, *sizes], dtype=np.int64)[:-1] for sizes in nbytes]),
        checksums=np.array([value for file in written for value in file.checksums], np.uint64),
        aliases=[],
    )


def _no_tensors(section: str) -> TensorTable:
    empty = np.empty(0, np.int64)
    return TensorTable([], [section], empty, empty, empty, empty)
