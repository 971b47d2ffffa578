"""The data files, and the frames of encoded ones: where the stored bytes of each chunk are, and what they decode to.

A frame is in the encoded file itself, or in a file of an older checkpoint, a *reference*, which has the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...tensors.tables import Int64
from ..checksums import Checksums

COMPANION = "companion"
"""The kind of a file for other programs. It belongs to the checkpoint, but no load reads it."""

FILE_KINDS = ("tensors", "values", "rank_values", COMPANION)

MAX_ENCODED_CHUNK = 16 << 20
"""The largest chunk of an encoded file in bytes: what a reader must hold to decode a frame."""

ENCODED_START = b"bcp\xffenc1"
"""The first bytes of an encoded file, in the place of a safetensors header length, which can never be that large."""


def encoded_head(head: bytes) -> bytes:
    """Return the head of an encoded file: ``head``, a safetensors header, with another start."""
    return ENCODED_START + head[len(ENCODED_START) :]


def is_encoded(codec: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return which of these codecs, one for each file, encode anything."""
    return np.array([name != "raw" for name in codec], bool)


@dataclass(eq=False)
class FileTable:
    """Every data file, one row each.

    ``name`` is its key relative to the checkpoint; ``size`` is in bytes; ``section`` is an index of the manifest's
    sections; ``rank`` wrote it; ``kind`` is "tensors", "values" (of every rank), "rank_values" (of the writer) or
    ``COMPANION``. The first ``head_length`` bytes (the safetensors header with its padding, or all of any other file)
    have the ``head_checksum``. Each ``chunk_size`` bytes of a shard have one checksum. ``codec`` is "raw", or
    the name of the codec of the file's ``frames``, which are those of all files; None if no file is encoded.
    """

    name: list[str]
    size: Int64
    section: Int64
    rank: Int64
    kind: list[str]
    head_length: Int64
    head_checksum: Checksums
    chunk_size: Int64
    codec: list[str]
    frames: FrameTable | None = None

    def __len__(self) -> int:
        return len(self.name)

    @property
    def data_size(self) -> Int64:
        """Bytes after the head of each file, as if it were not encoded."""
        size = self.size - self.head_length
        return (
            size
            if self.frames is None
            else np.where(is_encoded(self.codec), self.frames.sums(self.frames.nbytes), size)
        )


@dataclass(frozen=True, eq=False)
class ReferenceTable:
    """Files of older checkpoints that hold frames of this one.

    Attributes:
        name: ``<older attempt>/<file>``, next to the files of the checkpoint.
        size: Bytes of the whole file.
    """

    name: list[str] = field(default_factory=list)
    size: Int64 = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class FrameTable:
    """The frames of all encoded files, in the order of the files and of their bytes. Each holds one chunk of a shard.

    Attributes:
        length: Stored bytes of each frame. A frame as long as its chunk is the chunk itself.
        checksums: Those of the frames that are shorter than their chunks, in order (see ``Manifest.frame_checksums``).
        starts: File ``i`` has the frames ``[starts[i], starts[i + 1])``.
        begin: The chunk's first byte, counted from the file's data start as if the file were not encoded.
        nbytes: Bytes of the chunk.
        position: The frame's first byte in the file that holds it.
        source: 0 if the encoded file holds the frame itself, ``i + 1`` if row ``i`` of ``references`` does.
        references: The other files that hold frames.
    """

    length: Int64
    checksums: Checksums
    starts: Int64
    begin: Int64
    nbytes: Int64
    position: Int64
    source: Int64
    references: ReferenceTable

    @property
    def stored(self) -> Int64:
        """Bytes of each frame in the encoded file itself: 0 if a reference holds it."""
        return np.where(self.source == 0, self.length, 0)

    def rows(self, file: int) -> slice:
        """Return the frames of one file."""
        return slice(int(self.starts[file]), int(self.starts[file + 1]))

    def sums(self, column: Int64) -> Int64:
        """Return the sum of a column's numbers for each file."""
        total: Int64 = np.append(0, np.cumsum(column))[self.starts]
        return np.diff(total)
