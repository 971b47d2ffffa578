"""Compare stored bytes with the manifest's checksums as they arrive."""

from __future__ import annotations

from ..checksums import ChunkHasher, chunk_checksums
from .stored_files import Fault, StoredFiles

__all__ = ["ChunkCheck"]


class ChunkCheck:
    """Checks the shards of one file. Each shard's bytes arrive in order, from the start of a chunk to the end of one.

    Not thread-safe; releases the GIL while it hashes.
    """

    def __init__(self, source: StoredFiles, file: int, on_fault: Fault) -> None:
        manifest = source.manifest
        self._source, self._file, self._on_fault = source, file, on_fault
        self._starts, self._nbytes = manifest.checksum_starts, manifest.shard_nbytes
        self._checksums = manifest.checksums
        self.chunk_size = int(manifest.files.chunk_size[file])
        self._partial: ChunkHasher | None = None  # set while a chunk is incomplete; counts from ``_origin``
        self._origin = 0

    def feed(self, row: int, shard: int, begin: int, data: memoryview) -> None:
        """Check ``data``, the file's bytes from ``begin`` on: part of shard ``row``, which starts at byte ``shard``."""
        start = begin - shard
        end = start + len(data)
        is_complete = end % self.chunk_size == 0 or end == self._nbytes[row]
        if is_complete and self._partial is None:
            found = chunk_checksums(data, self.chunk_size)
        else:
            if self._partial is None:
                self._partial = ChunkHasher([0], [int(self._nbytes[row]) - start], self.chunk_size)
                self._origin = start
            hasher, done = self._partial, self._partial.chunks_done
            hasher.update(start - self._origin, data)
            found = hasher.completed_since(done)
            start = self._origin + done * self.chunk_size
            if is_complete:
                self._partial = None
        if found != self._expected(row, start, len(found)):
            self._report(row, shard, start, found)

    def _expected(self, row: int, start: int, count: int) -> list[bytes]:
        first = int(self._starts[row]) + start // self.chunk_size
        expected: list[bytes] = self._checksums[first : first + count].tolist()
        return expected

    def _report(self, row: int, shard: int, start: int, found: list[bytes]) -> None:
        expected = self._expected(row, start, len(found))
        index = next(i for i, (one, other) in enumerate(zip(found, expected)) if one != other)
        begin = shard + start + index * self.chunk_size
        end = min(begin + self.chunk_size, shard + int(self._nbytes[row]))
        self._on_fault(row, self._source.mismatch(self._file, row, begin, end))
