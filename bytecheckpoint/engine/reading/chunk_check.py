"""Stored bytes against the checksums of the manifest, as they arrive."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CorruptionError
from ..checksums import ChunkHasher, chunk_checksums
from .stored_files import StoredFiles

__all__ = ["ChunkCheck", "Fault"]

Fault = Callable[[int, CorruptionError], None]
"""Called with the row of a shard and what is wrong with a chunk of it: to raise it, or to note it and go on."""


class ChunkCheck:
    """Checks bytes of the shards of one file, which come in order: of every shard from the beginning of a chunk on, to
    the end of one. Not thread-safe; releases the interpreter lock while it hashes."""

    def __init__(self, source: StoredFiles, file: int, on_fault: Fault) -> None:
        manifest = source.manifest
        self._source, self._file, self._on_fault = source, file, on_fault
        self._starts, self._nbytes = manifest.checksum_starts, manifest.shard_nbytes
        self._checksums = manifest.checksums
        self.chunk_size = int(manifest.files.chunk_size[file])
        self._hasher = ChunkHasher(self.chunk_size)
        self._unfinished = 0  # bytes of a chunk that were hashed; the rest of it is to come

    def feed(self, row: int, shard: int, begin: int, data: memoryview) -> None:
        """Bytes of the file from ``begin`` on, part of shard ``row``, which begins at byte ``shard``."""
        start = begin - shard - self._unfinished
        end = begin - shard + len(data)
        whole = end % self.chunk_size == 0 or end == self._nbytes[row]
        if whole and not self._unfinished:
            found = chunk_checksums(data, self.chunk_size)
        else:
            self._hasher.update(data)
            if whole:
                self._hasher.end_item()
            found, self._hasher.checksums = self._hasher.checksums, []
            self._unfinished = 0 if whole else end % self.chunk_size
        if found != self._promised(row, start, len(found)):
            self._report(row, shard, start, found)

    def _promised(self, row: int, start: int, count: int) -> list[int]:
        first = int(self._starts[row]) + start // self.chunk_size
        promised: list[int] = self._checksums[first : first + count].tolist()
        return promised

    def _report(self, row: int, shard: int, start: int, found: list[int]) -> None:
        promised = self._promised(row, start, len(found))
        index = next(i for i, (one, other) in enumerate(zip(found, promised)) if one != other)
        begin = shard + start + index * self.chunk_size
        end = min(begin + self.chunk_size, shard + int(self._nbytes[row]))
        self._on_fault(row, self._source.mismatch(self._file, row, begin, end))
