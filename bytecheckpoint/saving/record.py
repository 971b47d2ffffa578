"""From the plan and the checksums of every rank to the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from ..engine.encoding import Frames
from ..engine.files import data_key
from ..engine.writing import WrittenFile
from ..errors import PlanError
from ..format.checksums import CHECKSUM_BYTES, Checksums, checksum_column, empty_checksums
from ..format.manifest.document import Manifest, SectionInfo, find_frames, timestamp
from ..format.manifest.files import FileTable, FrameTable, ReferenceTable
from ..format.safetensors import DATA_ALIGNMENT
from ..planners.save_plan import SavePlan
from ..tensors.tables import Int64, ragged_positions


@dataclass(frozen=True)
class WrittenFiles:
    """The files that this rank made durable: those of the plan, and companions, which no plan lists."""

    planned: Sequence[WrittenFile]
    companions: Sequence[WrittenFile]


def pack_written(files: Sequence[WrittenFile]) -> bytes:
    """Encode what rank 0 cannot derive from the plan: header lengths and checksums of a rank's files, in plan order."""
    checksums = b"".join([*(file.head_checksum for file in files), *(file.checksums.tobytes() for file in files)])
    frames = [
        None
        if file.frames is None
        else [
            file.frames.codec,
            file.frames.length.astype("<u4").tobytes(),
            file.frames.checksums.tobytes(),
            file.frames.source.astype("<u4").tobytes(),
            file.frames.offset.astype("<u8").tobytes(),
        ]
        for file in files
    ]
    packed: bytes = msgpack.packb([[file.head_length for file in files], checksums, frames])
    return packed


class Confirmations:
    """Decodes what the ranks of one save sent about their files, according to its plan."""

    def __init__(self, plan: SavePlan, *, attempt: str, chunk_size: int) -> None:
        self._plan, self._attempt, self._chunk_size = plan, attempt, chunk_size
        chunks = -(-plan.shards.nbytes(plan.tensors)[plan.order] // chunk_size)
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(chunks)))[plan.file_starts]
        self.chunk_counts: Int64 = ends[1:] - ends[:-1]
        """Number of checksums, by file of the plan."""

    def unpack(self, rank: int, message: bytes) -> list[WrittenFile]:
        """Decode the message that ``rank`` packed with ``pack_written``.

        Raises:
            PlanError: The message does not describe the files that the plan assigns to the rank.
        """
        planned = self._plan.files_of(rank)
        lengths, raw, packed = msgpack.unpackb(message)
        chunks = [0 if row is None else int(self.chunk_counts[row]) for _, _, row in planned]
        if len(lengths) != len(planned) or len(raw) != CHECKSUM_BYTES * (len(planned) + sum(chunks)):
            raise PlanError(
                f"rank {rank} was assigned {len(planned)} files with {sum(chunks)} checksums, but confirmed "
                f"{len(lengths)} files with {len(raw) // CHECKSUM_BYTES - len(lengths)} checksums"
            )
        checksums = checksum_column(raw)
        written, at = [], len(planned)
        for index, ((section, kind, row), length, count) in enumerate(zip(planned, lengths, chunks, strict=True)):
            if row is not None and (length <= 0 or length % DATA_ALIGNMENT):
                raise PlanError(
                    f"rank {rank} confirmed a file of {section} with a header of {length} bytes, which is not a "
                    f"multiple of {DATA_ALIGNMENT}"
                )
            size = 0 if row is None else self._plan.files[row].data_size
            frames = None
            if packed[index] is not None:
                frames = _unpack_frames(*packed[index])
                if len(frames.length) != count:
                    raise PlanError(f"rank {rank} confirmed {len(frames.length)} frames of a file of {count} chunks")
                size = frames.stored
            written.append(
                WrittenFile(
                    key=data_key(self._attempt, section, rank, kind, "raw" if frames is None else frames.codec),
                    size=length + size,
                    head_length=length,
                    head_checksum=checksums[index].item(),
                    chunk_size=self._chunk_size,
                    section=section,
                    kind=kind,
                    checksums=checksums[at : at + count],
                    frames=frames,
                )
            )
            at += count
        return written


def _unpack_frames(codec: str, length: bytes, checksums: bytes, source: bytes, offset: bytes) -> Frames:
    return Frames(
        codec,
        np.frombuffer(length, "<u4").astype(np.int64),
        checksum_column(checksums),
        np.frombuffer(source, "<u4").astype(np.int64),
        np.frombuffer(offset, "<u8").astype(np.int64),
    )


def build_manifest(
    plan: SavePlan,
    confirmed: Sequence[Sequence[WrittenFile]],
    *,
    attempt: str,
    step: int | None,
    metadata: dict[str, Any],
    library_version: str,
    is_shared: bool = False,
    older: ReferenceTable | None = None,
) -> Manifest:
    """Build the manifest of a save whose files are all durable. ``confirmed`` is by rank.

    ``older`` are the files to which frames may refer; with ``is_shared``, the new ones are objects of the root.
    """
    written = [(rank, file) for rank, files in enumerate(confirmed) for file in files]
    at = {(rank, file.section): row for row, (rank, file) in enumerate(written) if file.kind == "tensors"}
    file_row = np.array([at[f.rank, f.section] for f in plan.files], np.int64)
    section_index = {name: index for index, (name, _) in enumerate(plan.sections)}
    manifest = Manifest(
        library_version=library_version,
        step=step,
        created=timestamp(),
        world_size=len(confirmed),
        attempt=attempt,
        metadata=metadata,
        sections=[SectionInfo(name, kind) for name, kind in plan.sections],
        files=file_table(written, section_index),
        tensors=plan.tensors,
        scope=plan.scope,
        shards=plan.shards,
        shard_file=file_row[plan.file] if len(plan.file) else plan.file,
        shard_offset=plan.offset,
        checksums=_in_shard_order(plan, file_row, written),
        aliases=plan.aliases,
        is_shared=is_shared,
    )
    manifest.files.frames = _frame_table(manifest, written, older or ReferenceTable())
    return manifest.in_order()


def file_table(written: Sequence[tuple[int, WrittenFile]], section_index: Mapping[str, int]) -> FileTable:
    """Return the manifest's table of files, each written by a rank. ``section_index`` numbers the sections."""
    return FileTable(
        name=[file.key for _, file in written],
        size=np.array([file.size for _, file in written], np.int64),
        section=np.array([section_index[file.section] for _, file in written], np.int64),
        rank=np.array([rank for rank, _ in written], np.int64),
        kind=[file.kind for _, file in written],
        head_length=np.array([file.head_length for _, file in written], np.int64),
        head_checksum=checksum_column(file.head_checksum for _, file in written),
        chunk_size=np.array([file.chunk_size for _, file in written], np.int64),
        codec=["raw" if file.frames is None else file.frames.codec for _, file in written],
    )


def _frame_table(
    manifest: Manifest, written: Sequence[tuple[int, WrittenFile]], older: ReferenceTable
) -> FrameTable | None:
    frames = [file.frames for _, file in written if file.frames is not None]
    if not frames:
        return None
    source = np.concatenate([one.source for one in frames])
    used = np.unique(source[source > 0])
    return find_frames(
        manifest,
        np.concatenate([one.length for one in frames]),
        np.concatenate([one.checksums for one in frames]),
        source=np.where(source > 0, np.searchsorted(used, source) + 1, 0),
        offset=np.concatenate([one.offset for one in frames]),
        references=ReferenceTable([older.name[row] for row in (used - 1).tolist()], older.size[used - 1]),
    )


def _in_shard_order(plan: SavePlan, file_row: Int64, written: Sequence[tuple[int, WrittenFile]]) -> Checksums:
    """Reorder all checksums from the order of files and offsets to the plan's order of shards."""
    if not len(plan.file):
        return empty_checksums()
    chunk = np.array([file.chunk_size for _, file in written], np.int64)[file_row[plan.file]]
    counts = -(-plan.shards.nbytes(plan.tensors) // chunk)
    taken = np.concatenate([written[row][1].checksums for row in file_row.tolist()])
    starts = np.empty(len(counts), np.int64)
    starts[plan.order] = np.cumsum(counts[plan.order]) - counts[plan.order]
    return taken[ragged_positions(starts, counts)]
