"""The data files, and the frames of encoded ones: where the stored bytes of each chunk are, and what they decode to.

A frame is in the encoded file itself, or in a file of an older checkpoint, a *reference*, which has the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...tensors.tables import Int64, ragged_positions
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

    @classmethod
    def build(
        cls,
        files: FileTable,
        length: Int64,
        checksums: Checksums,
        *,
        source: Int64,
        offset: Int64,
        references: ReferenceTable,
        shard_file: Int64,
        shard_offset: Int64,
        shard_nbytes: Int64,
    ) -> FrameTable:
        """Find the chunk of each frame.

        ``offset`` are the positions of the frames that references hold, in order. Raises ``FormatError`` if the frames
        are not those of the shards. The numbers are untrusted; ``validate`` checks the references.
        """
        encoded, chunk_size = is_encoded(files.codec), files.chunk_size
        if len(shard_file) and int(shard_file.max()) >= len(files):
            raise FormatError("manifest: a shard refers to a file that does not exist")
        if ((chunk_size < 1) | (encoded & (chunk_size > MAX_ENCODED_CHUNK))).any():
            raise FormatError(f"manifest: the chunk size of an encoded file is not from 1 to {MAX_ENCODED_CHUNK}")
        rows = np.flatnonzero(encoded[shard_file] & (shard_nbytes != 0)) if len(files) else shard_file[:0]
        rows = rows[np.lexsort((shard_offset[rows], shard_file[rows]))]
        file, nbytes = shard_file[rows], shard_nbytes[rows]
        counts = -(-nbytes // chunk_size[file])
        # The maximum is compared first, because hostile counts may have a sum that wraps around.
        if (nbytes < 0).any() or int(counts.max(initial=0)) > len(length) or int(counts.sum()) != len(length):
            raise FormatError(f"manifest: {len(length)} frames, but the encoded files have {int(counts.sum())} chunks")
        skipped = ragged_positions(np.zeros_like(counts), counts) * np.repeat(chunk_size[file], counts)
        rest = np.repeat(nbytes, counts) - skipped
        of_file = np.repeat(file, counts)
        found = np.minimum(rest, chunk_size[of_file])
        bad = (length < 1) | (length > found)
        if bad.any():
            at = int(np.argmax(bad))
            raise FormatError(
                f"manifest: frame {at} has {length[at]} bytes, not from 1 to the {found[at]} of its chunk"
            )
        if len(source) != len(length) or len(offset) != np.count_nonzero(source):
            raise FormatError("manifest: columns of frames differ in length")
        if len(checksums) != np.count_nonzero(length < found):
            raise FormatError(f"manifest: {len(checksums)} checksums are not those of the frames that are encoded")
        starts = np.searchsorted(of_file, np.arange(len(files) + 1))
        stored = np.where(source == 0, length, 0)
        ends = np.cumsum(stored)
        before = np.append(0, ends)[starts[:-1]]
        position = ends - stored - before[of_file] + files.head_length[of_file]
        position[source != 0] = offset
        begin = np.repeat(shard_offset[rows], counts) + skipped
        return cls(length, checksums, starts, begin, found, position, source, references)

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
