"""Export a checkpoint as safetensors files in Hugging Face's layout, completely or not at all.

A model in one file is ``model.safetensors``. A model in several files is ``model-00001-of-0000N.safetensors`` and an
index, which is written last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifest_file import remove_files
from ..errors import (
    KeyExistsError,
    MismatchError,
    NameCollisionError,
    NameNotFoundError,
    UnsupportedTensorError,
    UsageError,
)
from ..format.hf_index import INDEX_KEY, SINGLE_KEY, index_document
from ..format.safetensors import DATA_ALIGNMENT
from ..load.matching import fault_lines
from ..load.options import Rename, renaming
from ..runtime.arguments import check_choice
from ..storage_backends import open_backend
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from .casts import output_dtype, parse_cast
from .rewriter import OutputFile, OutputTensor, Progress, Rewriter, cleanup_on_failure

__all__ = ["Expected", "ExportReport", "export_safetensors"]


Expected = Iterable[str] | Mapping[str, Sequence[int] | None]
"""The names that an export must have, no more and no less; a mapping also gives shapes, or None if unknown."""

Tied = Literal["drop", "copy"]

_MAX_ENTRY_BYTES = 128  # of a header entry without name and shape; an upper bound


@dataclass(frozen=True)
class ExportReport:
    """The result of ``export_safetensors``.

    Attributes:
        url: URL of the target folder.
        files: Name and bytes of each safetensors file.
        tensors: Number of exported tensors.
        total_size: Bytes of all exported tensors.
        dropped: Maps each tied name that was not exported to the name under which its bytes are.
        cast: Number of tensors that were cast.
        bytes_read: Bytes read from the checkpoint.
    """

    url: str
    files: tuple[tuple[str, int], ...]
    tensors: int
    total_size: int
    dropped: Mapping[str, str]
    cast: int
    bytes_read: int


def export_safetensors(
    checkpoint: Checkpoint,
    target_url: str,
    *,
    section: str = "model",
    max_file_bytes: int = 5_000_000_000,
    cast: str | torch.dtype | None = None,
    expected: Expected | None = None,
    rename: Rename | None = None,
    exclude: Sequence[str] = (),
    tied: Tied = "drop",
    progress: Progress = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the tensors of one section as safetensors files in Hugging Face's layout. Holds a few MiB at a time.

    All names, shapes and dtypes are checked before anything is read. After a failure nothing remains at the target.

    Args:
        checkpoint: The checkpoint to export.
        target_url: Target folder. It may hold other files, such as a configuration, but no model.
        section: The section to export.
        max_file_bytes: Size limit of each file. A larger tensor gets a separate file.
        cast: A floating-point dtype. Floating-point tensors of 16 bits or more are cast to it; others are not.
        expected: The exact names (and shapes) that the export must have. Tied names that are expected are written.
        rename: Maps a name inside the section to the exported name.
        exclude: Shell patterns; exported names that match one are left out.
        tied: Whether only one of several tied names is written ("drop"), or all of them ("copy").
        progress: Called with the number of bytes written since the last call.
        storage_options: Options for the target's storage backend.

    Returns:
        A report.

    Raises:
        UsageError: An argument is invalid.
        NameNotFoundError: The checkpoint has no such section.
        MismatchError: The names or shapes are not the expected ones, or a tensor belongs to a single rank. Lists all.
        NameCollisionError: Two tensors would have the same name.
        UnsupportedTensorError: safetensors cannot represent the dtype of a tensor.
        KeyExistsError: The target already holds a model.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    target = open_backend(target_url, **dict(storage_options or {}))
    tensors, dropped = _choose(checkpoint, section, renaming(rename), exclude, tied, expected, parse_cast(cast))
    _refuse_model(target)
    files = _split(tensors, section, max_file_bytes)
    done: list[str] = []
    with cleanup_on_failure(lambda: remove_files(target, done)):
        with Rewriter(checkpoint.index) as rewriter:
            for file in files:
                rewriter.write(target, file, progress)
                done.append(file.key)
        if len(files) > 1:
            done.append(INDEX_KEY)
            target.put(INDEX_KEY, _index(files))
    metas = checkpoint.manifest.tensors.meta_of
    return ExportReport(
        target.url,
        tuple((file.key, file.size) for file in files),
        len(tensors),
        sum(tensor.nbytes for tensor in tensors),
        dropped,
        sum(tensor.dtype != metas(tensor.row).dtype for tensor in tensors),
        rewriter.bytes_read,
    )


def _choose(
    checkpoint: Checkpoint,
    section: str,
    rename: Callable[[str], str],
    exclude: Sequence[str],
    tied: Tied,
    expected: Expected | None,
    cast: DType | None,
) -> tuple[list[OutputTensor], dict[str, str]]:
    """Return the tensors to write, sorted by name, and the tied names that are dropped."""
    check_choice("tied", tied, Tied)
    manifest = checkpoint.manifest
    if manifest.section_index(section) is None:
        raise NameNotFoundError(f"{checkpoint.url} has no section {section!r}; it has {', '.join(checkpoint.sections)}")
    required = None if expected is None else _expected_shapes(expected)
    groups = _groups(checkpoint, section, rename, exclude)
    rows: dict[str, int] = {}
    dropped: dict[str, str] = {}
    for row, names in groups.items():
        chosen = [name for name in names if required and name in required] or names[:1]
        if tied == "copy" and required is None:
            chosen = names
        rows |= dict.fromkeys(chosen, row)
        dropped |= {name: chosen[0] for name in names if name not in chosen}
    if required is not None:
        _check_expected(checkpoint, required, rows)
    metas = {name: manifest.tensors.meta_of(row) for name, row in rows.items()}
    tensors = [
        OutputTensor(name, row, Box.whole(metas[name].shape), output_dtype(metas[name].dtype, cast))
        for name, row in sorted(rows.items())
    ]
    _check_dtypes(tensors)
    return tensors, dropped


def _groups(
    checkpoint: Checkpoint, section: str, rename: Callable[[str], str], exclude: Sequence[str]
) -> dict[int, list[str]]:
    """Return all exported names of each tensor row, the stored name first."""
    manifest = checkpoint.manifest
    names: dict[int, list[str]] = {}
    per_rank: list[str] = []
    for row in manifest.section_tensors(section).tolist():
        name = rename(manifest.tensors.fqn_of(row))
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        if manifest.scope[row] >= 0:
            per_rank.append(name)
        names[row] = [name]
    if per_rank:
        raise MismatchError(
            f"{checkpoint.url}: {len(per_rank)} tensor(s) of section {section!r} were saved for single ranks and are "
            f"not part of the model: {_shown(per_rank)}; leave them out with exclude",
            [("per_rank", name, "saved for a single rank") for name in per_rank],
        )
    for alias, stored in checkpoint.aliases.items():
        row = manifest.tensor_row(stored)
        name = rename(alias[len(section) + 1 :])
        if alias.startswith(f"{section}.") and row in names and not any(fnmatchcase(name, p) for p in exclude):
            names[row].append(name)
    counts = Counter(name for group in names.values() for name in group)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise NameCollisionError(f"several tensors would be exported under one name: {_shown(twice)}; change rename")
    return names


def _expected_shapes(expected: Expected) -> dict[str, tuple[int, ...] | None]:
    if isinstance(expected, Mapping):
        return {name: None if shape is None else tuple(shape) for name, shape in expected.items()}
    if isinstance(expected, str):
        raise UsageError(f"expected must be a list of names or a mapping of names to shapes, not {expected!r}")
    return dict.fromkeys(expected)


def _check_expected(
    checkpoint: Checkpoint, required: Mapping[str, tuple[int, ...] | None], rows: Mapping[str, int]
) -> None:
    shape_of = checkpoint.manifest.tensors.shape_of
    faults = [("missing", name, "") for name in required if name not in rows]
    faults += [("unexpected", name, "") for name in rows if name not in required]
    faults += [
        ("shape", name, f"{list(shape_of(rows[name]))} is stored, {list(shape)} is expected")
        for name, shape in required.items()
        if shape is not None and name in rows and shape_of(rows[name]) != shape
    ]
    if not faults:
        return
    head = f"{checkpoint.url} does not have the expected tensors ({len(faults)} fault(s)); nothing was written:"
    advice = dict.fromkeys(("missing", "unexpected", "shape"), "")
    raise MismatchError("\n".join([head, *fault_lines(faults, sorted(rows), advice)]), faults)


def _check_dtypes(tensors: Sequence[OutputTensor]) -> None:
    odd = [f"{tensor.name} ({tensor.dtype})" for tensor in tensors if tensor.dtype.safetensors is None]
    if odd:
        raise UnsupportedTensorError(
            f"safetensors has no dtype for {len(odd)} tensor(s): {_shown(odd)}; leave them out with exclude"
        )


def _refuse_model(target: StorageBackend) -> None:
    """Raise ``KeyExistsError`` if the folder holds a model. Other files, such as a tokenizer, are allowed."""
    there = [name for name in target.list_children("") if name.endswith(".safetensors") or name == INDEX_KEY]
    if there:
        raise KeyExistsError(
            f"{target.url} already holds a model ({_shown(there)}), which was not changed; "
            f"give another target, or remove these files first"
        )


def _split(tensors: Sequence[OutputTensor], section: str, max_file_bytes: int) -> list[OutputFile]:
    """Distribute tensors over files in order; start a new file when the next tensor would exceed the limit."""
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes must be positive, not {max_file_bytes}")
    parts: list[list[OutputTensor]] = []
    head, data = _MAX_ENTRY_BYTES, 0
    for tensor in tensors:
        entry = (
            len(json.dumps(tensor.name, ensure_ascii=False).encode()) + len(str(tensor.box.lengths)) + _MAX_ENTRY_BYTES
        )
        size = -(-(head + entry) // DATA_ALIGNMENT) * DATA_ALIGNMENT + data + tensor.nbytes
        if not parts or size > max_file_bytes:
            parts.append([])
            head, data = _MAX_ENTRY_BYTES, 0
        parts[-1].append(tensor)
        head, data = head + entry, data + tensor.nbytes
    note = {"format": "pt"}
    if len(parts) <= 1:
        return [OutputFile.lay_out(SINGLE_KEY, section, parts[0] if parts else [], note)]
    return [
        OutputFile.lay_out(f"model-{number:05d}-of-{len(parts):05d}.safetensors", section, part, note)
        for number, part in enumerate(parts, 1)
    ]


def _index(files: Sequence[OutputFile]) -> bytes:
    file_of = {tensor.name: file.key for file in files for tensor in file.tensors}
    return index_document(file_of, sum(file.data_size for file in files))


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
