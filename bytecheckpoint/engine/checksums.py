"""Checksums of chunks: xxh3-64 of every ``chunk_size`` bytes of a shard, the last chunk being what is left."""

from __future__ import annotations

import xxhash

__all__ = ["ChunkHasher", "chunk_checksums", "chunk_size_for"]

_LEAST_CHUNK = 256 << 10  # hashing is no slower than with longer ones, reading and writing go by more anyway
_MOST_CHUNKS = 4 << 20  # 32 MiB of manifest


def chunk_size_for(nbytes: int) -> int:
    """Bytes under one checksum in a checkpoint of ``nbytes``: 256 KiB up to 1 TiB, and then as many more as keep the
    manifest small. A chunk is the least that a checked read fetches, so short ones make resharding cheap."""
    size = _LEAST_CHUNK
    while nbytes > size * _MOST_CHUNKS:
        size *= 2
    return size


def chunk_checksums(data: memoryview, chunk_size: int) -> list[int]:
    """xxh3-64 of consecutive pieces of ``chunk_size`` bytes. Releases the interpreter lock while it hashes."""
    return [xxhash.xxh3_64_intdigest(data[at : at + chunk_size]) for at in range(0, len(data), chunk_size)]


class ChunkHasher:
    """xxh3-64 of consecutive ``chunk_size`` bytes of what is fed in pieces of any length; each item begins anew."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self.checksums: list[int] = []

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + self._chunk_size - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            at += len(part)
            if self._filled == self._chunk_size:
                self.end_item()

    def end_item(self) -> None:
        """Close the last, shorter chunk of an item."""
        if self._filled:
            self.checksums.append(self._hash.intdigest())
            self._hash.reset()
            self._filled = 0
