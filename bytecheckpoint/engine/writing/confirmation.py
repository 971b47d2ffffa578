"""What a rank tells rank 0 of the files it made durable: what the plan does not know, which is checksums for the most
part."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np

from ...errors import PlanError
from ...planners import SavePlan
from ...tables import Int64
from ..file_layout import data_key
from .image_write import WrittenFile

__all__ = ["Confirmed", "pack_written"]


def pack_written(files: Sequence[WrittenFile]) -> bytes:
    """A rank's files, in the order in which its plan lists them."""
    heads = np.array([file.head_checksum for file in files], np.uint64)
    checksums = np.concatenate([heads, *(file.checksums for file in files)])
    packed: bytes = msgpack.packb([[file.head_length for file in files], checksums.astype("<u8").tobytes()])
    return packed


class Confirmed:
    """What all ranks of one save have written, by its plan."""

    def __init__(self, plan: SavePlan, *, attempt: str, chunk_size: int) -> None:
        self._plan, self._attempt, self._chunk_size = plan, attempt, chunk_size
        chunks = -(-plan.shards.nbytes(plan.tensors)[plan.order] // chunk_size)
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(chunks)))[plan.file_starts]
        self.chunk_counts: Int64 = ends[1:] - ends[:-1]
        """By file of the plan, how many checksums it has."""

    def unpack(self, rank: int, told: bytes) -> list[WrittenFile]:
        """What ``rank`` told by ``pack_written``. Raises ``PlanError`` where that is not what it was to write."""
        planned = self._plan.files_of(rank)
        lengths, raw = msgpack.unpackb(told)
        chunks = [0 if row is None else int(self.chunk_counts[row]) for _, _, row in planned]
        if len(lengths) != len(planned) or len(raw) != 8 * (len(planned) + sum(chunks)):
            raise PlanError(
                f"rank {rank} was to write {len(planned)} files with {sum(chunks)} checksums and tells of "
                f"{len(lengths)} files, with {len(raw) // 8 - len(lengths)} checksums"
            )
        words = np.frombuffer(raw, "<u8").astype(np.uint64)
        written, at = [], len(planned)
        for index, ((section, kind, row), count) in enumerate(zip(planned, chunks)):
            written.append(
                WrittenFile(
                    key=data_key(self._attempt, section, rank, kind),
                    size=lengths[index] + (0 if row is None else self._plan.files[row].data_size),
                    head_length=lengths[index],
                    head_checksum=int(words[index]),
                    chunk_size=self._chunk_size,
                    section=section,
                    kind=kind,
                    checksums=words[at : at + count],
                )
            )
            at += count
        return written
