"""From the plan and what every rank confirmed to the manifest that will be committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import PlanError
from ...manifest import FileTable, Manifest, SectionInfo, timestamp
from ...planners import SavePlan
from ...tables import Int64, ragged_positions
from .image_write import WrittenFile

__all__ = ["record"]


def record(
    plan: SavePlan,
    confirmed: Sequence[Sequence[WrittenFile]],
    *,
    attempt: str,
    step: int | None,
    metadata: dict[str, Any],
    library_version: str,
) -> Manifest:
    """The manifest of a save whose files are all durable. ``confirmed`` is by rank.

    Raises ``PlanError`` where a rank did not write what it was given.
    """
    written = [(rank, file) for rank, files in enumerate(confirmed) for file in files]
    at = {(rank, file.section): row for row, (rank, file) in enumerate(written) if file.kind == "tensors"}
    lacking = [f"{f.section} by rank {f.rank}" for f in plan.files if (f.rank, f.section) not in at]
    if lacking:
        raise PlanError(f"planned files were not written: {', '.join(lacking)}")
    file_row = np.array([at[f.rank, f.section] for f in plan.files], np.int64)
    section_index = {name: index for index, (name, _) in enumerate(plan.sections)}
    return Manifest.assemble(
        library_version=library_version,
        step=step,
        created=timestamp(),
        world_size=len(confirmed),
        attempt=attempt,
        metadata=metadata,
        sections=[SectionInfo(name, kind) for name, kind in plan.sections],
        files=FileTable(
            name=[file.key for _, file in written],
            size=np.array([file.size for _, file in written], np.int64),
            section=np.array([section_index[file.section] for _, file in written], np.int64),
            rank=np.array([rank for rank, _ in written], np.int64),
            kind=[file.kind for _, file in written],
            head_length=np.array([file.head_length for _, file in written], np.int64),
            head_checksum=np.array([file.head_checksum for _, file in written], np.uint64),
            chunk_size=np.array([file.chunk_size for _, file in written], np.int64),
            codec=["raw"] * len(written),
        ),
        tensors=plan.tensors,
        scope=plan.scope,
        shards=plan.shards,
        shard_file=file_row[plan.file] if len(plan.file) else plan.file,
        shard_offset=plan.offset,
        checksums=_in_shard_order(plan, file_row, written),
        aliases=plan.aliases,
    )


def _in_shard_order(
    plan: SavePlan, file_row: Int64, written: Sequence[tuple[int, WrittenFile]]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """All checksums, from the order of files and offsets in which they were taken to the plan's order of shards."""
    if not len(plan.file):
        return np.empty(0, np.uint64)
    chunk = np.array([file.chunk_size for _, file in written], np.int64)[file_row[plan.file]]
    counts = -(-plan.shards.nbytes(plan.tensors) // chunk)
    taken = np.concatenate([written[row][1].checksums for row in file_row.tolist()])
    if len(taken) != int(counts.sum()):
        raise PlanError(f"ranks sent {len(taken)} checksums, the plan has {int(counts.sum())} chunks")
    starts = np.empty(len(counts), np.int64)
    starts[plan.order] = np.cumsum(counts[plan.order]) - counts[plan.order]
    return taken[ragged_positions(starts, counts)]
