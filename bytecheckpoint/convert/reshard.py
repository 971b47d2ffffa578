"""A checkpoint rewritten for another number of files: whole tensors, or tensors cut along their first dimension.

No load needs this: any layout is read from any other. It makes many small files few, and one large file many, so that
each reader of a known world finds its part in one piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

from .checkpoint import Checkpoint
from .engine.checksums import chunk_size_for
from .engine.reading.stored_files import read_stored_file
from .engine.writing.commit import commit, new_attempt, remove_attempt
from .errors import CommitUnknownError, StateError
from .geometry import Box
from .manifest import COMPANION, FileTable, Manifest
from .rewriting import Item, Progress, Rewriter, StreamedFile, refuse_checkpoint
from .safetensors_file import shard_name
from .storage_backends import open_backend
from .storage_backends.base import StorageBackend
from .tables import BoxTable
from .version import HEADER_METADATA, VERSION

__all__ = ["Layout", "PlannedOutput", "ReshardReport", "reshard"]

Layout = Literal["whole", "sharded"]

_MAX_FILES = 1 << 20


@dataclass(frozen=True)
class PlannedOutput:
    """A file of the new checkpoint: ``size`` in bytes, ``shards`` in it (0 for a file of plain values)."""

    name: str
    section: str
    shards: int
    size: int


@dataclass(frozen=True)
class ReshardReport:
    """What was, or with ``dry_run`` would be, written. ``bytes_to_read`` is known before; ``bytes_read`` is 0 in a dry
    run."""

    url: str
    layout: Layout
    dry_run: bool
    files: tuple[PlannedOutput, ...]
    bytes_to_read: int
    bytes_read: int

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)


def reshard(
    checkpoint: Checkpoint,
    target_url: str,
    *,
    files: int,
    layout: Layout = "whole",
    dry_run: bool = False,
    progress: Progress = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReshardReport:
    """Rewrite all of ``checkpoint`` as a new one at ``target_url`` with up to ``files`` tensor files a section.

    ``whole`` keeps each tensor in one piece and balances the files by bytes. ``sharded`` cuts each tensor along its
    first dimension into as many parts as there are files, as ``torch.chunk`` does, one part a file; what has fewer
    rows gives fewer parts. Tensors of single ranks stay whole. Plain values, tied names, step, time and metadata are
    kept, and so is the world size, which is what the values of single ranks refer to.

    Pieces of a few MiB are read, checked and written; the checkpoint appears when all is durable, and a failure
    leaves nothing behind. ``dry_run`` plans only. Raises ``StateError`` for arguments that mean nothing,
    ``KeyExistsError`` where a checkpoint is at the target already, ``CorruptionError``, ``StorageError``.
    """
    if not 1 <= files <= _MAX_FILES:
        raise StateError(f"files must be from 1 to {_MAX_FILES}, not {files}")
    if layout not in ("whole", "sharded"):
        raise StateError(f"layout must be 'whole' or 'sharded', not {layout!r}")
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, checkpoint.url)
    attempt = new_attempt()
    manifest = checkpoint.manifest
    outputs = list(_plan(manifest, files, layout, attempt))
    plans = [PlannedOutput(out.key, section, len(out.items), out.size) for section, out in outputs]
    # Companions speak of the files that were; in the new ones they would be wrong.
    values = [row for row, kind in enumerate(manifest.files.kind) if kind not in ("tensors", COMPANION)]
    for row in values:
        section = manifest.sections[int(manifest.files.section[row])].name
        plans.append(PlannedOutput(_values_key(manifest, row, attempt), section, 0, int(manifest.files.size[row])))
    heads = int(manifest.files.head_length.sum())
    bytes_to_read = manifest.nbytes + heads
    bytes_read = 0
    if not dry_run:
        try:
            checksums, bytes_read = _write(checkpoint, target, [out for _, out in outputs], progress)
            for row in values:
                bytes_read += _copy_values(checkpoint, target, row, attempt, progress)
            commit(target, _manifest(checkpoint, attempt, outputs, checksums, values))
        except CommitUnknownError:
            raise
        except BaseException:
            remove_attempt(target, attempt)
            raise
    return ReshardReport(target.url, layout, dry_run, tuple(plans), bytes_to_read, bytes_read)


def _plan(manifest: Manifest, files: int, layout: Layout, attempt: str) -> Iterator[tuple[str, StreamedFile]]:
    for section in manifest.sections:
        parts: list[list[Item]] = [[] for _ in range(files)]
        whole: list[Item] = []
        for row in manifest.section_tensors(section.name).tolist():
            pieces = _pieces(manifest, row, files if layout == "sharded" and manifest.scope[row] < 0 else 1)
            if len(pieces) == 1:
                whole.append(pieces[0])
            else:
                for part, piece in zip(parts, pieces):
                    part.append(piece)
        _balance(whole, parts)
        for number, part in enumerate(parts):
            if part:
                key = f"{attempt}/{section.name}-{number:05d}.safetensors"
                yield section.name, StreamedFile.lay_out(key, part, HEADER_METADATA)


def _pieces(manifest: Manifest, row: int, count: int) -> list[Item]:
    """The tensor in at most ``count`` boxes along dimension 0."""
    meta, fqn = manifest.tensors.meta_of(row), manifest.tensors.fqn_of(row)
    whole = Box.whole(meta.shape)
    if count == 1 or not meta.shape or meta.numel == 0 or meta.shape[0] == 1:
        return [Item(fqn, row, whole, meta.dtype)]
    step = -(-meta.shape[0] // count)
    rest = meta.shape[1:]
    boxes = [
        Box((start, *(0 for _ in rest)), (min(step, meta.shape[0] - start), *rest))
        for start in range(0, meta.shape[0], step)
    ]
    return [Item(shard_name(fqn, box, whole=box == whole), row, box, meta.dtype) for box in boxes]


def _balance(items: Sequence[Item], parts: Sequence[list[Item]]) -> None:
    """Give each item, the largest first, to the part with the fewest bytes."""
    loads = [(sum(item.nbytes for item in part), index) for index, part in enumerate(parts)]
    heapq.heapify(loads)
    for item in sorted(items, key=lambda item: (-item.nbytes, item.name)):
        load, index = heapq.heappop(loads)
        parts[index].append(item)
        heapq.heappush(loads, (load + item.nbytes, index))


def _write(
    checkpoint: Checkpoint, target: StorageBackend, outputs: Sequence[StreamedFile], progress: Progress
) -> tuple[list[int], int]:
    with Rewriter(checkpoint) as rewriter:
        checksums: list[int] = []
        for out in outputs:
            checksums += rewriter.write(target, out, progress, chunk_size=_chunk_size(outputs))
        return checksums, rewriter.bytes_read


def _chunk_size(outputs: Sequence[StreamedFile]) -> int:
    return chunk_size_for(sum(out.size - len(out.head) for out in outputs))


def _values_key(manifest: Manifest, row: int, attempt: str) -> str:
    return f"{attempt}/{manifest.files.name[row].rpartition('/')[2]}"


def _copy_values(checkpoint: Checkpoint, target: StorageBackend, row: int, attempt: str, progress: Progress) -> int:
    """Plain values are the same bytes in every layout."""
    document = read_stored_file(checkpoint.backend, checkpoint.manifest, row, head_only=False)
    with target.create(_values_key(checkpoint.manifest, row, attempt), len(document)) as writer:
        writer.write(0, document)
        writer.complete()
    progress(len(document))
    return len(document)


def _manifest(
    checkpoint: Checkpoint,
    attempt: str,
    outputs: Sequence[tuple[str, StreamedFile]],
    checksums: Sequence[int],
    values: Sequence[int],
) -> Manifest:
    old = checkpoint.manifest
    kept = np.array(values, np.int64)
    index = {section.name: i for i, section in enumerate(old.sections)}
    items = [(file, item) for file, (_, out) in enumerate(outputs) for item in out.items]
    offsets = [out.offsets() for _, out in outputs]
    new = len(outputs)

    def column(made: Sequence[int], column: Any) -> Any:
        return np.concatenate([np.array(made, column.dtype), column[kept]])

    files = FileTable(
        name=[out.key for _, out in outputs] + [_values_key(old, row, attempt) for row in values],
        size=column([out.size for _, out in outputs], old.files.size),
        section=column([index[section] for section, _ in outputs], old.files.section),
        rank=column([0] * new, old.files.rank),  # one process wrote them
        kind=["tensors"] * new + [old.files.kind[row] for row in values],
        head_length=column([len(out.head) for _, out in outputs], old.files.head_length),
        head_checksum=column([xxhash.xxh3_64_intdigest(out.head) for _, out in outputs], old.files.head_checksum),
        chunk_size=column([_chunk_size([out for _, out in outputs])] * new, old.files.chunk_size),
        codec=["raw"] * (new + len(values)),
    )
    return Manifest.assemble(
        library_version=VERSION,
        step=old.step,
        created=old.created,
        world_size=old.world_size,
        attempt=attempt,
        metadata=old.metadata,
        sections=old.sections,
        files=files,
        tensors=old.tensors,
        scope=old.scope,
        shards=BoxTable.build([(item.row, item.box) for _, item in items]),
        shard_file=np.array([file for file, _ in items], np.int64),
        shard_offset=np.concatenate([np.empty(0, np.int64), *offsets]),
        checksums=np.array(checksums, np.uint64),
        aliases=list(old.aliases),
    )
