"""Import Hugging Face's safetensors files as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ..checkpoint.attempts import new_attempt, remove_attempt
from ..checkpoint.manifest_file import commit
from ..engine.checksums import ChunkHasher, chunk_size_for
from ..errors import NameCollisionError, UsageError
from ..foreign.manifest import TensorFile, whole_tensor_manifest
from ..foreign.safetensors_folder import SafetensorsFolder, meta_of
from ..format.manifest import timestamp
from ..format.safetensors import HeaderEntry, build_header
from ..frameworks.sections import check_state, split_rank_name
from ..load.options import Rename, renaming
from ..storage_backends import open_backend
from ..storage_backends.base import StorageBackend
from ..version import HEADER_METADATA, VERSION
from .rewriter import PIECE_BYTES, Progress, cleanup_on_failure, refuse_checkpoint

__all__ = ["ImportReport", "import_safetensors"]


@dataclass(frozen=True)
class ImportReport:
    """The result of ``import_safetensors``.

    Attributes:
        url: URL of the new checkpoint.
        section: The section that holds the tensors.
        files: Names of the imported files.
        tensors: Number of tensors.
        total_size: Bytes of all tensors.
    """

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
    """Commit a checkpoint that holds the tensors of safetensors files. Holds a few MiB at a time.

    The checkpoint appears when all files are durable. After a failure nothing remains at the target.

    Args:
        source_url: A ``.safetensors`` file, or a folder in Hugging Face's layout.
        target_url: Where to put the checkpoint.
        section: The section for the tensors.
        step: The step to store with the checkpoint.
        rename: Maps a name in the files to the name inside the section.
        progress: Called with the number of bytes imported since the last call.
        source_options: Options for the source's storage backend.
        storage_options: Options for the target's storage backend.

    Returns:
        A report.

    Raises:
        UsageError: ``step`` is negative, or ``section`` is not a valid name.
        CheckpointNotFoundError: Nothing is stored at the source.
        NotACheckpointError: The source holds no model, or more than one.
        FormatError: A file violates the format, or disagrees with the index.
        CorruptionError: A file that the index names is missing.
        UnsupportedTensorError: torch does not have the dtype of a tensor.
        NameCollisionError: Two tensors would have the same name.
        KeyExistsError: The target already holds a checkpoint.
        StorageError: A store failed.
    """
    check_state({section: None})
    if step is not None and step < 0:
        raise UsageError(f"step must not be negative: {step}")
    source = SafetensorsFolder(source_url, storage_options=source_options)
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, source.backend.url)
    names = _section_names(source, renaming(rename))
    attempt = new_attempt()
    with cleanup_on_failure(lambda: remove_attempt(target, attempt)):
        files = [
            _copy_file(source, key, target, f"{attempt}/{section}-{number:05d}.safetensors", names, progress)
            for number, key in enumerate(source.headers)
        ]
        manifest = whole_tensor_manifest(
            section,
            files,
            chunk_size=chunk_size_for(source.nbytes),
            step=step,
            created=timestamp(),
            attempt=attempt,
            library_version=VERSION,
        )
        commit(target, manifest)
    return ImportReport(target.url, section, tuple(source.headers), len(names), source.nbytes)


def _section_names(source: SafetensorsFolder, rename: Callable[[str], str]) -> dict[str, str]:
    """Return the name inside the section for each name in the files."""
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
) -> TensorFile:
    header = source.headers[key]
    metas = [meta_of(record, f"{source.backend.url}/{key}") for record in header.entries]
    tensors = [(names[record.name], meta, record.begin) for record, meta in zip(header.entries, metas)]
    head = build_header([HeaderEntry(name, m.dtype, m.shape, m.nbytes) for name, m, _ in tensors], HEADER_METADATA)
    size = len(head) + sum(meta.nbytes for meta in metas)
    hasher = ChunkHasher(
        [record.begin for record in header.entries], [meta.nbytes for meta in metas], chunk_size_for(source.nbytes)
    )
    buffer = memoryview(bytearray(PIECE_BYTES))
    with target.create(new_key, size) as writer:
        writer.write(0, head)
        for record in header.entries:
            for begin in range(record.begin, record.end, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, record.end - begin)]
                source.backend.read_into(key, header.data_start + begin, piece)
                writer.write(len(head) + begin, piece)
                hasher.update(begin, piece)
                progress(len(piece))
        writer.complete()
    return TensorFile(new_key, size, len(head), xxhash.xxh3_64_intdigest(head), tensors, hasher.checksums())
