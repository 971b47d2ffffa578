"""The frames of encoded files: where the stored bytes of each chunk are, and what they decode to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...tensors.tables import Int64, ragged_positions

__all__ = ["ENCODED_START", "MAX_ENCODED_CHUNK", "FrameTable", "encoded_head", "is_encoded"]

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


@dataclass(frozen=True, eq=False)
class FrameTable:
    """The frames of all encoded files, in the order of the files and of their bytes. Each holds one chunk of a shard.

    Attributes:
        length: Stored bytes of each frame. A frame as long as its chunk is the chunk itself.
        checksum: xxh3-64 of these bytes.
        starts: File ``i`` has the frames ``[starts[i], starts[i + 1])``.
        begin: The chunk's first byte, counted from the file's data start as if the file were not encoded.
        nbytes: Bytes of the chunk.
        position: The frame's first byte in the file.
    """

    length: Int64
    checksum: npt.NDArray[np.uint64]
    starts: Int64
    begin: Int64
    nbytes: Int64
    position: Int64

    @classmethod
    def build(
        cls,
        length: Int64,
        checksum: npt.NDArray[np.uint64],
        *,
        encoded: npt.NDArray[np.bool_],
        head_length: Int64,
        chunk_size: Int64,
        shard_file: Int64,
        shard_offset: Int64,
        shard_nbytes: Int64,
    ) -> FrameTable:
        """Find the chunk of each frame. ``encoded``, ``head_length`` and ``chunk_size`` are by file.

        Raises ``FormatError`` if the frames are not those of the shards. The numbers are untrusted.
        """
        files = len(encoded)
        if len(shard_file) and int(shard_file.max()) >= files:
            raise FormatError("manifest: a shard refers to a file that does not exist")
        if ((chunk_size < 1) | (encoded & (chunk_size > MAX_ENCODED_CHUNK))).any():
            raise FormatError(f"manifest: the chunk size of an encoded file is not from 1 to {MAX_ENCODED_CHUNK}")
        rows = np.flatnonzero(encoded[shard_file] & (shard_nbytes != 0)) if files else shard_file[:0]
        rows = rows[np.lexsort((shard_offset[rows], shard_file[rows]))]
        file, offset, nbytes = shard_file[rows], shard_offset[rows], shard_nbytes[rows]
        counts = -(-nbytes // chunk_size[file])
        # The maximum is compared first, because hostile counts may have a sum that wraps around.
        if (nbytes < 0).any() or int(counts.max(initial=0)) > len(length) or int(counts.sum()) != len(length):
            raise FormatError(f"manifest: {len(length)} frames, but the encoded files have {int(counts.sum())} chunks")
        skipped = ragged_positions(np.zeros_like(counts), counts) * np.repeat(chunk_size[file], counts)
        stored = np.repeat(nbytes, counts) - skipped
        of_file = np.repeat(file, counts)
        found = np.minimum(stored, chunk_size[of_file])
        bad = (length < 1) | (length > found)
        if bad.any():
            at = int(np.argmax(bad))
            raise FormatError(
                f"manifest: frame {at} has {length[at]} bytes, not from 1 to the {found[at]} of its chunk"
            )
        starts = np.searchsorted(of_file, np.arange(files + 1))
        ends = np.cumsum(length)
        before = np.append(0, ends)[starts[:-1]]
        position = ends - length - before[of_file] + head_length[of_file]
        return cls(length, checksum, starts, np.repeat(offset, counts) + skipped, found, position)

    def rows(self, file: int) -> slice:
        """Return the frames of one file."""
        return slice(int(self.starts[file]), int(self.starts[file + 1]))

    def sums(self, column: Int64) -> Int64:
        """Return the sum of a column's numbers for each file."""
        total: Int64 = np.append(0, np.cumsum(column))[self.starts]
        return np.diff(total)
