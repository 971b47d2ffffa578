"""Import Hugging Face's safetensors files as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.attempts import new_attempt, remove_attempt
from ..checkpoint.manifest_file import commit
from ..errors import NameCollisionError, UsageError
from ..foreign.huggingface import index_folder
from ..foreign.safetensors_folder import SafetensorsFolder
from ..format.manifest import Manifest, timestamp
from ..frameworks.sections import check_state, split_rank_name
from ..load.options import Rename, renaming
from ..storage_backends import open_backend
from ..tensors.geometry import Box
from ..version import HEADER_METADATA
from .rewriter import OutputFile, OutputTensor, Progress, Rewriter, cleanup_on_failure, refuse_checkpoint

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
    source = SafetensorsFolder.at(source_url, storage_options=source_options)
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, source.backend.url)
    names = _section_names(source, renaming(rename))
    manifest = replace(index_folder(source, section, names).manifest, step=step, created=timestamp())
    attempt = new_attempt()
    outputs = [_output(manifest, section, number, attempt) for number in range(len(manifest.files))]
    with cleanup_on_failure(lambda: remove_attempt(target, attempt)):
        with Rewriter(source.backend, manifest, verify=False) as rewriter:
            new = rewriter.write_all(target, attempt, outputs, progress)
        commit(target, new)
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


def _output(manifest: Manifest, section: str, number: int, attempt: str) -> OutputFile:
    """Lay out the new file for the tensors of one source file."""
    metas, fqn_of = manifest.tensors.meta_of, manifest.tensors.fqn_of
    rows = manifest.shards.tensor[manifest.shards_in(number)].tolist()
    tensors = [OutputTensor(fqn_of(row), row, Box.whole(metas(row).shape), metas(row).dtype) for row in rows]
    return OutputFile.lay_out(f"{attempt}/{section}-{number:05d}.safetensors", section, tensors, HEADER_METADATA)
