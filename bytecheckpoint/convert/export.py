"""To Hugging Face's layout of safetensors files: streaming, complete or not at all.

A model of one file is ``model.safetensors``; of several, ``model-00001-of-0000N.safetensors`` and an index, which is
written last. Names are compared with what the caller expects before the first byte is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from .checkpoint import Checkpoint
from .dtypes import DTYPES, DType, casts_at_all
from .engine.writing.commit import remove_files
from .errors import KeyExistsError, MismatchError, NameCollisionError, StateError, UnsupportedTensorError
from .geometry import Box
from .hf_index import INDEX_KEY, SINGLE_KEY, index_document
from .matching import Rename, fault_lines, renaming
from .rewriting import Item, Progress, Rewriter, StreamedFile
from .safetensors_file import DATA_ALIGNMENT
from .storage_backends import open_backend
from .storage_backends.base import StorageBackend

__all__ = ["Expected", "ExportReport", "export_safetensors"]


Expected = Iterable[str] | Mapping[str, Sequence[int] | None]
"""The names that an export must have, no more and no less; with shapes, where they are known."""

_ENTRY_BYTES = 128  # of a header entry, beside name and shape; more than it ever takes


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. ``files`` are (name, bytes); ``total_size`` is the bytes of all tensors. ``dropped`` maps
    tied names that were left out to the name that their bytes are under; ``cast`` counts the tensors that were cast."""

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
    tied: Literal["drop", "copy"] = "drop",
    progress: Progress = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write the tensors of ``section`` to the folder ``target_url`` as Hugging Face's libraries lay them out.

    Needs no memory for the model: pieces of a few MiB are read, checked, cast and written. ``max_file_bytes`` bounds
    each file; a tensor that is larger gets a file for itself. ``cast`` is a floating dtype: tensors of 16 and more
    bits a real number are cast to it, all others are kept. ``rename`` maps a name within the section to the exported
    one; ``exclude`` are shell patterns on the exported names. Of tied names one is written and the others dropped,
    or all are written with ``tied="copy"``; a name that is ``expected`` is always written.

    With ``expected``, the export has exactly these names (and shapes), or raises ``MismatchError`` that lists every
    fault before anything is read. Raises ``KeyExistsError`` where the folder has a model already,
    ``UnsupportedTensorError`` for dtypes that safetensors has no code for, ``CorruptionError``, ``StorageError``.
    After any error nothing is left behind.
    """
    target = open_backend(target_url, **dict(storage_options or {}))
    items, dropped = _choose(checkpoint, section, renaming(rename), exclude, tied, expected, _dtype(cast))
    _refuse_model(target)
    files = _split(items, max_file_bytes)
    done: list[str] = []
    try:
        with Rewriter(checkpoint) as rewriter:
            for file in files:
                rewriter.write(target, file, progress)
                done.append(file.key)
            bytes_read = rewriter.bytes_read
        if len(files) > 1:
            done.append(INDEX_KEY)
            target.put(INDEX_KEY, _index(files))
    except BaseException:
        remove_files(target, done)
        raise
    metas = checkpoint.manifest.tensors.meta_of
    return ExportReport(
        target.url,
        tuple((file.key, file.size) for file in files),
        len(items),
        sum(item.nbytes for item in items),
        dropped,
        sum(item.dtype != metas(item.row).dtype for item in items),
        bytes_read,
    )


def _choose(
    checkpoint: Checkpoint,
    section: str,
    rename: Callable[[str], str],
    exclude: Sequence[str],
    tied: str,
    expected: Expected | None,
    cast: DType | None,
) -> tuple[list[Item], dict[str, str]]:
    """What is written under which names, in the order of names, and the tied names that are not."""
    if tied not in ("drop", "copy"):
        raise StateError(f"tied must be 'drop' or 'copy', not {tied!r}")
    manifest = checkpoint.manifest
    if manifest.section_index(section) is None:
        raise StateError(f"{checkpoint.url} has no section {section!r}; it has {', '.join(checkpoint.sections)}")
    wanted = None if expected is None else _shapes(expected)
    groups = _groups(checkpoint, section, rename, exclude)
    rows: dict[str, int] = {}
    dropped: dict[str, str] = {}
    for row, names in groups.items():
        chosen = [name for name in names if wanted and name in wanted] or names[:1]
        chosen = names if tied == "copy" and wanted is None else chosen
        rows |= dict.fromkeys(chosen, row)
        dropped |= {name: chosen[0] for name in names if name not in chosen}
    if wanted is not None:
        _check_expected(checkpoint, wanted, rows)
    metas = {name: manifest.tensors.meta_of(row) for name, row in rows.items()}
    items = [
        Item(name, row, Box.whole(metas[name].shape), _cast(metas[name].dtype, cast))
        for name, row in sorted(rows.items())
    ]
    _check_dtypes(items)
    return items, dropped


def _groups(
    checkpoint: Checkpoint, section: str, rename: Callable[[str], str], exclude: Sequence[str]
) -> dict[int, list[str]]:
    """By tensor row all the names that it is exported under, the stored one first."""
    manifest = checkpoint.manifest
    names: dict[int, list[str]] = {}
    own: list[str] = []
    for row in manifest.section_tensors(section).tolist():
        name = rename(manifest.tensors.fqn_of(row))
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        if manifest.scope[row] >= 0:
            own.append(name)
        names[row] = [name]
    if own:
        raise MismatchError(
            f"{checkpoint.url}: {len(own)} tensor(s) of section {section!r} were saved for single ranks and are no "
            f"part of the model: {_listed(own)}; leave them out with exclude",
            [("per_rank", name, "saved for a single rank") for name in own],
        )
    for alias, stored in checkpoint.aliases.items():
        row = manifest.tensor_row(stored)
        name = rename(alias[len(section) + 1 :])
        if alias.startswith(f"{section}.") and row in names and not any(fnmatchcase(name, p) for p in exclude):
            names[row].append(name)
    counts = Counter(name for group in names.values() for name in group)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise NameCollisionError(f"several tensors would be exported under one name: {_listed(twice)}; change rename")
    return names


def _shapes(expected: Expected) -> dict[str, tuple[int, ...] | None]:
    if isinstance(expected, Mapping):
        return {name: None if shape is None else tuple(shape) for name, shape in expected.items()}
    if isinstance(expected, str):
        raise StateError(f"expected is a list of names, or a mapping of names to shapes, not the string {expected!r}")
    return dict.fromkeys(expected)


def _check_expected(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...] | None], rows: Mapping[str, int]
) -> None:
    shape_of = checkpoint.manifest.tensors.shape_of
    faults = [("missing", name, "") for name in wanted if name not in rows]
    faults += [("unexpected", name, "") for name in rows if name not in wanted]
    faults += [
        ("shape", name, f"{list(shape_of(rows[name]))} is stored, {list(shape)} is expected")
        for name, shape in wanted.items()
        if shape is not None and name in rows and shape_of(rows[name]) != shape
    ]
    if not faults:
        return
    head = f"{checkpoint.url} has not the tensors that are expected ({len(faults)} fault(s)); nothing was written:"
    advice = dict.fromkeys(("missing", "unexpected", "shape"), "")
    raise MismatchError("\n".join([head, *fault_lines(faults, sorted(rows), advice)]), faults)


def _dtype(cast: str | torch.dtype | None) -> DType | None:
    if cast is None:
        return None
    dtype = DTYPES.get(str(cast).removeprefix("torch."))
    if dtype is None or dtype.kind != "float" or dtype.itemsize < 2:
        raise StateError(f"cast must be float16, bfloat16, float32 or float64, not {cast}")
    return dtype


def _cast(stored: DType, wanted: DType | None) -> DType:
    # Eight-bit floats are half of a quantised tensor, whose scale lies elsewhere: their values alone mean nothing.
    if wanted is None or stored.kind != "float" or stored.itemsize < 2 or not casts_at_all(stored, wanted):
        return stored
    return wanted


def _check_dtypes(items: Sequence[Item]) -> None:
    odd = [f"{item.name} ({item.dtype})" for item in items if item.dtype.safetensors is None]
    if odd:
        raise UnsupportedTensorError(
            f"safetensors has no dtype for {len(odd)} tensor(s): {_listed(odd)}; leave them out with exclude"
        )


def _refuse_model(target: StorageBackend) -> None:
    """Other files (configuration, tokenizer) may be there; another model's parts would be mixed with this one's."""
    there = [name for name in target.list_children("") if name.endswith(".safetensors") or name == INDEX_KEY]
    if there:
        raise KeyExistsError(
            f"{target.url} holds a model already ({_listed(there)}), and it was left as it is; "
            f"give another target, or remove these files first"
        )


def _split(items: Sequence[Item], max_file_bytes: int) -> list[StreamedFile]:
    """Tensors in the order of names, a new file where the next one would go over the limit."""
    if max_file_bytes < 1:
        raise StateError(f"max_file_bytes must be positive, not {max_file_bytes}")
    parts: list[list[Item]] = []
    head, data = _ENTRY_BYTES, 0
    for item in items:
        entry = len(json.dumps(item.name, ensure_ascii=False).encode()) + len(str(item.box.lengths)) + _ENTRY_BYTES
        size = -(-(head + entry) // DATA_ALIGNMENT) * DATA_ALIGNMENT + data + item.nbytes
        if not parts or size > max_file_bytes:
            parts.append([])
            head, data = _ENTRY_BYTES, 0
        parts[-1].append(item)
        head, data = head + entry, data + item.nbytes
    note = {"format": "pt"}
    if len(parts) <= 1:
        return [StreamedFile.lay_out(SINGLE_KEY, parts[0] if parts else [], note)]
    return [
        StreamedFile.lay_out(f"model-{number:05d}-of-{len(parts):05d}.safetensors", part, note)
        for number, part in enumerate(parts, 1)
    ]


def _index(files: Sequence[StreamedFile]) -> bytes:
    file_of = {item.name: file.key for file in files for item in file.items}
    return index_document(file_of, sum(file.data_size for file in files))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
