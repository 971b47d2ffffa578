"""Rewrite a checkpoint for another number of files: whole tensors, or tensors split along their first dimension.

Loading never requires this, because any layout can be loaded into any other. It combines many small files into few, or
splits a large file, so that each rank of a known world size finds its part in one file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..checkpoint.attempts import new_attempt
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.index import Index
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.selection import Exclusion
from ..checkpoint.values import StoredValue, refuse_unread
from ..engine.files import data_key
from ..errors import NameCollisionError, UsageError
from ..foreign.naming import MODEL_SECTION
from ..format.manifest.document import Manifest, SectionInfo
from ..format.manifest.files import COMPANION
from ..format.safetensors import shard_name
from ..format.values.files import encode_path, encode_values_file
from ..frameworks.sections import split_rank_name
from ..runtime.arguments import check_choice
from ..runtime.modes import default_modes
from ..tensors.geometry import Box
from ..tensors.tables import TensorTable
from ..version import HEADER_METADATA
from .related import kept_files
from .rewriter import OutputFile, OutputTensor, Progress, Rewriter, refuse_checkpoint

Layout = Literal["whole", "sharded"]

_MAX_FILES = 1 << 20  # more is certainly a mistake


@dataclass(frozen=True)
class ReshardedFile:
    """A file of the new checkpoint.

    Attributes:
        name: Key of the file.
        section: Section of its content.
        shards: Number of shards in it; 0 for a file of plain values.
        size: Bytes of the file.
    """

    name: str
    section: str
    shards: int
    size: int


@dataclass(frozen=True)
class ReshardReport:
    """The result of ``reshard``, or its plan after a dry run.

    Attributes:
        url: URL of the new checkpoint.
        layout: Layout of its tensors.
        dry_run: Whether nothing was written.
        files: All files of the new checkpoint.
        bytes_to_read: Bytes that the plan reads.
        bytes_read: Bytes that were read; 0 after a dry run.
    """

    url: str
    layout: Layout
    dry_run: bool
    files: tuple[ReshardedFile, ...]
    bytes_to_read: int
    bytes_read: int

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)


@default_modes()
def reshard(
    checkpoint: Checkpoint,
    target: AnyLocation,
    *,
    files: int,
    layout: Layout = "whole",
    dry_run: bool = False,
    progress: Progress = lambda nbytes: None,
) -> ReshardReport:
    """Rewrite a checkpoint with another number of files. Holds a few MiB at a time.

    Plain values, tied names, step, time and metadata are kept. So is the world size, because the values of single
    ranks refer to it. The new checkpoint appears when all files are durable. After a failure nothing remains at the
    target.

    Args:
        checkpoint: The checkpoint to rewrite.
        target: Where to put the new checkpoint.
        files: Maximum number of tensor files per section.
        layout: "whole" keeps each tensor in one piece and balances the files by bytes. "sharded" splits each tensor
            along its first dimension, as ``torch.chunk`` does, with one part per file; a tensor with fewer rows has
            fewer parts. Tensors of single ranks are never split.
        dry_run: Return the plan without reading or writing data.
        progress: Called with the number of bytes written since the last call.

    Returns:
        A report.

    Raises:
        UsageError: An argument is invalid.
        KeyExistsError: The target already holds a checkpoint.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    if not 1 <= files <= _MAX_FILES:
        raise UsageError(f"files must be from 1 to {_MAX_FILES}, not {files}")
    check_choice("layout", layout, Layout)
    store = Location.of(target).open()
    refuse_checkpoint(store, checkpoint.url)
    attempt = new_attempt()
    manifest = checkpoint.manifest
    # Companions describe the old files and would be wrong for the new ones.
    values = _encoded_values(checkpoint.index.values(), checkpoint.url, attempt)
    outputs = [*_tensor_files(manifest, files, layout, attempt), *values]
    plans = [ReshardedFile(out.key, out.section, len(out.tensors), out.size) for out in outputs]
    bytes_to_read = manifest.nbytes + int(manifest.files.head_length.sum())
    bytes_read = 0
    if not dry_run:
        rewriter = Rewriter(checkpoint.index)
        rewriter.commit(store, attempt, outputs, progress)
        bytes_read = rewriter.bytes_read + sum(one.size for one in values)
    return ReshardReport(store.url, layout, dry_run, tuple(plans), bytes_to_read, bytes_read)


def whole_files(part: Index, source: Checkpoint, attempt: str) -> list[OutputFile]:
    """Return the files of a new checkpoint: a ``chosen_part`` with whole tensors, and the related files of its source.

    Raises ``StateError`` for an object in another system's checkpoint that this library does not read.
    """
    manifest = part.manifest
    files = list(_tensor_files(manifest, max(len(source.manifest.files), 1), "whole", attempt))
    files += _encoded_values(part.foreign_values, part.url, attempt)
    # The configuration and the like belong to the model, or to the only section.
    owner = MODEL_SECTION if manifest.section_index(MODEL_SECTION) is not None else manifest.sections[0].name
    kept = kept_files(source)
    return files + [OutputFile(f"{attempt}/{name}", owner, kept[name], kind=COMPANION) for name in kept]


def _tensor_files(manifest: Manifest, files: int, layout: Layout, attempt: str) -> Iterator[OutputFile]:
    """Lay out the files of tensors (see ``reshard``)."""
    for section in manifest.sections:
        parts: list[list[OutputTensor]] = [[] for _ in range(files)]
        whole: list[OutputTensor] = []
        for row in manifest.section_tensors(section.name).tolist():
            pieces = _pieces(manifest, row, files if layout == "sharded" and manifest.scope[row] < 0 else 1)
            if len(pieces) == 1:
                whole.append(pieces[0])
            else:
                for part, piece in zip(parts, pieces, strict=False):  # the last parts may get none
                    part.append(piece)
        _balance(whole, parts)
        for number, part in enumerate(parts):
            if part:
                key = f"{attempt}/{section.name}-{number:05d}.safetensors"
                yield OutputFile.lay_out(key, section.name, part, HEADER_METADATA)


def _pieces(manifest: Manifest, row: int, count: int) -> list[OutputTensor]:
    """Split a tensor into at most ``count`` boxes along dimension 0."""
    meta, fqn = manifest.tensors.meta_of(row), manifest.tensors.fqn_of(row)
    whole = Box.whole(meta.shape)
    if count == 1 or not meta.shape or meta.numel == 0 or meta.shape[0] == 1:
        return [OutputTensor(fqn, row, whole, meta.dtype)]
    rows, step = meta.shape[0], -(-meta.shape[0] // count)
    boxes = [whole.narrow(0, start, min(start + step, rows)) for start in range(0, rows, step)]
    return [OutputTensor(shard_name(fqn, box, whole=False), row, box, meta.dtype) for box in boxes]


def _balance(tensors: Sequence[OutputTensor], parts: Sequence[list[OutputTensor]]) -> None:
    """Assign each tensor, the largest first, to the part with the fewest bytes."""
    loads = [(sum(tensor.nbytes for tensor in part), index) for index, part in enumerate(parts)]
    heapq.heapify(loads)
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name)):
        load, index = heapq.heappop(loads)
        parts[index].append(tensor)
        heapq.heappush(loads, (load + tensor.nbytes, index))


def _encoded_values(values: Iterable[StoredValue], url: str, attempt: str) -> list[OutputFile]:
    values = list(values)
    refuse_unread(values, url)
    groups: dict[tuple[str, int | None], list[tuple[bytes, bool, bytes]]] = {}
    for value in values:
        groups.setdefault((value.section, value.rank), []).append(
            (encode_path(value.path), value.rank is None, value.encoded)
        )
    files = []
    for (section, rank), entries in groups.items():
        kind = "values" if rank is None else "rank_values"
        key = data_key(attempt, section, rank or 0, kind)
        files.append(OutputFile(key, section, encode_values_file(entries), kind=kind, rank=rank or 0))
    return files


def chosen_part(index: Index, sections: Mapping[str, str], exclude: Exclusion) -> Index:
    """Return the index of some sections, by their new names, without what is excluded.

    It has no checksums, and holds its values itself. Raises ``NameCollisionError``.
    """
    old = index.manifest
    names: dict[str, str] = {}  # the new full name of each kept tensor
    rows: list[tuple[str, str, Any]] = []
    for row, full in enumerate(old.tensors.names):
        section, fqn = sections.get(old.tensors.section_of(row)), old.tensors.fqn_of(row)
        if section is not None and not exclude(full):
            names[full] = _full_name(section, fqn)
            rows.append((section, fqn, old.tensors.meta_of(row)))
    kept = np.array([full in names for full in old.tensors.names], bool)
    shards = np.flatnonzero(kept[old.shards.tensor])
    moved = old.shards.take(shards)
    moved.tensor = (np.cumsum(kept) - 1)[moved.tensor]
    aliases = [
        (_full_name(sections[one], alias[len(one) + 1 :]), names[full])
        for alias, full in old.aliases
        if (one := alias.partition(".")[0]) in sections and not exclude(alias) and full in names
    ]
    tensors = TensorTable.build(rows)
    infos = [SectionInfo(sections[one.name], one.kind) for one in old.sections if one.name in sections]
    manifest, order = old.with_tensors(
        infos, tensors, old.scope[kept], moved, old.shard_file[shards], old.shard_offset[shards], aliases
    )
    views = None if index.views is None else index.views.take(shards[order])
    values = tuple(
        one._replace(section=sections[one.section])
        for one in index.values()
        if one.section in sections and not exclude(one.name)
    )
    return replace(index, manifest=manifest, foreign_values=values, views=views, names=None)


def _full_name(section: str, fqn: str) -> str:
    if not fqn or split_rank_name(fqn)[1] is not None:
        raise NameCollisionError(f"{fqn!r:.200}: a name cannot be empty or end in @<number>; rename it")
    return f"{section}.{fqn}"
