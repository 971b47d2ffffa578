"""What the two ways to exchange shared reads have in common: streams that are verified on arrival.

The reader of a piece checks it against the manifest. Its xxh3 in the reader's memory then travels with it, and every
receiver compares it. The manifest's own checksums do not fit: pieces hold elements in the requested dtype and begin
between chunks. TCP's checksum misses one damaged segment in 65,536 and does not cover damage in a host's memory; xxh3
costs less than a tenth of the time on the wire.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

import xxhash

from ...control.base import Operation
from ...errors import CorruptionError
from ...planners import PartBox, Ring
from .pieces import StoredPieces

__all__ = ["Exchange", "checksum_of"]

_HASH = struct.Struct("<Q")


class Exchange(ABC):
    """One rank's part in reads that ``shares.ranks`` share: ``shares.ranks[i]`` reads ``shares.segments[i]``.

    The methods raise what reading and the streams raise, and ``CorruptionError``.
    """

    def __init__(self, name: str, shares: Ring, pieces: StoredPieces, op: Operation, readers: Executor) -> None:
        self._name, self._shares, self._pieces, self._ranks = name, shares, pieces, shares.ranks
        self._index = self._ranks.index(op.rank)
        self._streams, self._readers = op.streams(), readers
        self._timings, self._verify = pieces.reader.timings, pieces.reader.verify
        self._received = [0] * len(self._ranks)  # by sender, so that each counter has one writing thread

    @property
    def bytes_received(self) -> int:
        """Bytes from other ranks so far."""
        return sum(self._received)

    @abstractmethod
    def tasks(self) -> Iterator[Callable[[], None]]:
        """Tasks that wait for each other and for other ranks, so that each needs a thread."""

    def reads(self) -> Iterable[Callable[[], None]]:
        """Tasks for the reading threads, in order. They never wait for other tasks."""
        return ()

    def stop(self) -> None:  # noqa: B027 - most exchanges wait for other ranks only, which the failure report ends
        """End waits for reads that will not be done. Called once, after a failure."""

    def _send(self, to: int, views: Iterable[memoryview], checksum: int) -> None:
        """Send bytes, and their checksum, to ``ranks[to]``."""
        for view in views:
            self._streams.send(self._ranks[to], self._name, view)
        if self._verify:
            self._streams.send(self._ranks[to], self._name, _HASH.pack(checksum))

    def _receive(self, source: int, reader: int, views: Iterator[memoryview], part_boxes: Sequence[PartBox]) -> int:
        """Fill ``views`` from ``ranks[source]`` with bytes that ``ranks[reader]`` read; returns their checksum."""
        hasher = xxhash.xxh3_64()
        for view in views:
            self._streams.receive(self._ranks[source], self._name, view)
            if self._verify:
                hasher.update(view)
        if not self._verify:
            return 0
        sent = bytearray(_HASH.size)
        self._streams.receive(self._ranks[source], self._name, sent)
        (checksum,) = _HASH.unpack(sent)
        if hasher.intdigest() != checksum:
            more = f" (or one of {len(part_boxes) - 1} more boxes)" if len(part_boxes) > 1 else ""
            raise CorruptionError(
                f"{self._pieces.describe(part_boxes[0])}{more} arrived damaged from rank {self._ranks[source]}; rank "
                f"{self._ranks[reader]} had read and verified it. The stored bytes are intact: load again, with "
                "share_reads='never' if the error persists, and check the memory and network of these hosts"
            )
        return int(checksum)


def checksum_of(views: Iterable[memoryview]) -> int:
    """The xxh3 of the bytes of all views."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()
