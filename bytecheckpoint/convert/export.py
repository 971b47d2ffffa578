"""Export a checkpoint as safetensors files in Hugging Face's layout, completely or not at all.

A model in one file is ``model.safetensors``. A model in several files is ``model-00001-of-0000N.safetensors`` and an
index, which is written last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.manifest_file import remove_files
from ..checkpoint.selection import Exclusion
from ..errors import KeyExistsError, UsageError
from ..format.hf_index import ADAPTER_CONFIG_KEY, INDEX_KEY, SINGLE_KEY, index_document
from ..format.safetensors import DATA_ALIGNMENT
from ..runtime.messages import listed
from ..runtime.modes import default_modes
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DTYPES
from .lora import ADAPTER_KEY, Lora, LoraPlan
from .related import put_files, with_dtype
from .rewriter import OutputFile, OutputTensor, Progress, Rewriter, cleanup_on_failure
from .selection import Expected, ExportedBox, ExportSelection, Tied, parse_cast

__all__ = ["Expected", "ExportReport", "ExportedBox", "Lora", "Tied", "export_safetensors"]

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
        related: Names of the related files that were written.
    """

    url: str
    files: tuple[tuple[str, int], ...]
    tensors: int
    total_size: int
    dropped: Mapping[str, str]
    cast: int
    bytes_read: int
    related: tuple[str, ...] = ()


@default_modes()
def export_safetensors(
    checkpoint: Checkpoint,
    target: AnyLocation,
    *,
    section: str = "model",
    max_file_bytes: int = 5_000_000_000,
    cast: str | torch.dtype | None = None,
    expected: Expected | None = None,
    exclude: Sequence[str] = (),
    tied: Tied = "drop",
    parts: Mapping[str, ExportedBox] | None = None,
    related: Mapping[str, bytes] | None = None,
    lora: Lora | None = None,
    masters: bool = False,
    progress: Progress = lambda nbytes: None,
) -> ExportReport:
    """Write the tensors of one section as safetensors files in Hugging Face's layout. Holds a few MiB at a time.

    All names, shapes and dtypes are checked before anything is read. After a failure nothing remains at the target.

    Args:
        checkpoint: The checkpoint to export, under the names that the export has (``Checkpoint.renamed``).
        target: Target folder. It may hold other files, such as a configuration, but no model.
        section: The section to export.
        max_file_bytes: Size limit of each file. A larger tensor gets a separate file.
        cast: A floating-point dtype. Floating-point tensors of 16 bits or more are cast to it; others are not.
        expected: The exact names (and shapes) that the export must have. Tied names that are expected are written.
        exclude: Shell patterns; exported names that match one are left out.
        tied: Whether only one of several tied names is written ("drop"), or all of them ("copy").
        parts: Tensors to write in place of stored ones of which they are parts, by exported name.
        related: Other files to write, such as the configuration, by name. In ``config.json``, the dtype becomes that of
            the cast, or float32 with ``masters``.
        lora: What to do with a LoRA adapter in the section: merge it into the model, or write it alone, as PEFT does.
            By default, its tensors are exported like all others.
        masters: Write the master weights of an optimizer in place of the tensors that are rounded from them.
        progress: Called with the number of bytes written since the last call.

    Returns:
        A report.

    Raises:
        UsageError: An argument is invalid, or the scaling of an adapter is unknown.
        NameNotFoundError: The checkpoint has no such section, no adapter, or no master weights.
        MismatchError: The names or shapes are not the expected ones, a tensor belongs to a single rank, a pattern
            matches nothing, or an adapter does not fit. Lists all.
        StateError: A weight in another system's file is of a class that this library does not read.
        NameCollisionError: Two tensors would have the same name.
        UnsupportedTensorError: safetensors cannot represent the dtype of a tensor, or an adapter is more than LoRA.
        KeyExistsError: The target already holds a model, or a related file with other contents.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    store = Location.of(target).open()
    dtype = parse_cast(cast)
    plan = None if lora is None or section not in checkpoint.sections else LoraPlan(checkpoint, section, lora)
    selection = ExportSelection(checkpoint, section, Exclusion(exclude), tied, parts or {}, plan, masters)
    tensors, dropped = selection.choose(expected, dtype)
    _refuse_model(store)
    stated = DTYPES["float32"] if masters and dtype is None else dtype
    others = with_dtype(related or {}, stated) if stated is not None else related or {}
    if plan is not None and lora is not None and lora.how == "peft":
        files = [OutputFile.lay_out(ADAPTER_KEY, section, tensors, {"format": "pt"})]
        others = {ADAPTER_CONFIG_KEY: plan.config_file()}
    else:
        files = _split(tensors, section, max_file_bytes)
    done: list[str] = []
    with cleanup_on_failure(lambda: remove_files(store, done)):
        added = put_files(store, others)
        done += added
        with Rewriter(checkpoint.index) as rewriter:
            for file in files:
                rewriter.write(store, file, progress)
                done.append(file.key)
        if len(files) > 1:
            done.append(INDEX_KEY)
            store.put(INDEX_KEY, _index(files))
    metas = checkpoint.manifest.tensors.meta_of
    return ExportReport(
        store.url,
        tuple((file.key, file.size) for file in files),
        len(tensors),
        sum(tensor.nbytes for tensor in tensors),
        dropped,
        sum(tensor.dtype != metas(tensor.row).dtype for tensor in tensors),
        rewriter.bytes_read,
        tuple(added),
    )


def _refuse_model(target: StorageBackend) -> None:
    """Raise ``KeyExistsError`` if the folder holds a model. Other files, such as a tokenizer, are allowed."""
    there = [name for name in target.list_children("") if name.endswith(".safetensors") or name == INDEX_KEY]
    if there:
        raise KeyExistsError(
            f"{target.url} already holds a model ({listed(there)}), which was not changed; "
            f"give another target, or remove these files first"
        )


def _split(tensors: Sequence[OutputTensor], section: str, max_file_bytes: int) -> list[OutputFile]:
    """Distribute tensors over files in order; start a new file when the next tensor would exceed the limit."""
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes must be positive, not {max_file_bytes}")
    parts: list[list[OutputTensor]] = []
    head, data = _MAX_ENTRY_BYTES, 0
    for tensor in tensors:
        entry = len(json.dumps(tensor.name, ensure_ascii=False).encode()) + len(str(tensor.shape)) + _MAX_ENTRY_BYTES
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
