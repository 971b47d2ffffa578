"""Chunk checksums: that of every ``chunk_size`` bytes of a tensor; the last chunk may be shorter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ..format.checksums import Checksums, checksum_column, checksum_of, empty_checksums
from ..tensors.tables import Int64, ragged_positions

_MIN_CHUNK_BYTES = 256 << 10  # longer chunks hash no faster
_MAX_CHUNKS = 4 << 20  # 64 MiB of manifest


def chunk_size_for(nbytes: int) -> int:
    """Return the chunk size for a checkpoint of ``nbytes``: 256 KiB, or more above 1 TiB to keep the manifest small.

    A checked read fetches whole chunks, so small chunks make partial reads (resharding) cheap.
    """
    size = _MIN_CHUNK_BYTES
    while nbytes > size * _MAX_CHUNKS:
        size *= 2
    return size


def chunk_checksums(data: memoryview, chunk_size: int) -> list[bytes]:
    """Return the checksums of consecutive chunks. Releases the GIL while it hashes."""
    return [checksum_of(data[at : at + chunk_size]) for at in range(0, len(data), chunk_size)]


class ChunkHasher:
    """Hashes the chunks of several spans of a byte stream that arrives in order, in pieces of any length.

    Each span, the bytes of one tensor, starts a new chunk. Bytes between spans, such as a file's header, are not
    hashed. Not thread-safe; releases the GIL while it hashes.
    """

    def __init__(self, offsets: Sequence[int] | Int64, nbytes: Sequence[int] | Int64, chunk_size: int) -> None:
        """Expect spans of ``nbytes[i]`` bytes at ``offsets[i]`` of the stream, in ascending order."""
        self._starts, self._stops = chunk_bounds(
            np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64), chunk_size
        )
        self._checksums = empty_checksums(len(self._starts))
        self._assumed = np.zeros(len(self._starts), bool)
        self._partial: xxhash.xxh3_128 | None = None  # of the next chunk, if a piece ended inside it
        self.position = 0
        """Bytes of the stream that have arrived."""
        self.chunks_done = 0
        """Chunks whose checksums are complete."""

    def update(self, start: int, data: memoryview) -> None:
        """Hash ``data``, the next bytes of the stream. Raises ``ValueError`` if they do not start at ``position``."""
        if start != self.position:
            raise ValueError(f"a piece starts at byte {start}, but the hash is at byte {self.position}")
        self.position = stop = start + len(data)
        done = int(np.searchsorted(self._stops, stop, side="right"))
        first = self.chunks_done
        if self._partial is not None:
            self._partial.update(data[: int(self._stops[first]) - start])
            if done == first:
                return
            self._keep(first, [self._partial.digest()])
            self._partial = None
            first += 1
        begins, ends = (self._starts[first:done] - start).tolist(), (self._stops[first:done] - start).tolist()
        if self._assumed[first:done].any():
            for chunk, begin, end in zip(range(first, done), begins, ends, strict=True):
                if not self._assumed[chunk]:
                    self._keep(chunk, [checksum_of(data[begin:end])])
        else:
            self._keep(first, [checksum_of(data[begin:end]) for begin, end in zip(begins, ends, strict=True)])
        self.chunks_done = done
        if done < len(self._starts) and self._starts[done] < stop and not self._assumed[done]:
            self._partial = xxhash.xxh3_128(data[int(self._starts[done]) - start :])

    def assume(self, chunks: npt.NDArray[np.bool_], checksums: Checksums) -> None:
        """Take the checksums of these chunks as given. Call it before the first ``update``."""
        self._assumed = chunks
        self._checksums[chunks] = checksums[chunks]

    def skip(self, nbytes: int) -> None:
        """Pass the next bytes: whole chunks whose checksums are given. Raises ``ValueError`` if they are not."""
        stop, first = self.position + nbytes, self.chunks_done
        done = int(np.searchsorted(self._stops, stop, side="right"))
        if self._partial is not None or self._stops[done - 1] != stop or not self._assumed[first:done].all():
            raise ValueError(f"bytes [{self.position}, {stop}) are not whole chunks whose checksums are given")
        self.position, self.chunks_done = stop, done

    def _keep(self, first: int, values: list[bytes]) -> None:
        self._checksums[first : first + len(values)] = checksum_column(values)

    def completed(self, chunks: slice) -> Checksums:
        """Return the checksums of complete chunks."""
        return self._checksums[chunks]

    def checksums(self) -> Checksums:
        """Return the checksums of all chunks, in order. Raises ``ValueError`` if chunks are incomplete."""
        if self.chunks_done != len(self._checksums):
            raise ValueError(f"only {self.chunks_done} of {len(self._checksums)} chunks have been hashed")
        return self._checksums


def chunk_bounds(offsets: Int64, nbytes: Int64, chunk_size: int) -> tuple[Int64, Int64]:
    """Return where each chunk starts and stops in the stream."""
    counts = -(-nbytes // chunk_size)
    starts = np.repeat(offsets, counts) + ragged_positions(np.zeros_like(counts), counts) * chunk_size
    return starts, np.minimum(starts + chunk_size, np.repeat(offsets + nbytes, counts))
