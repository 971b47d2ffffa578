"""What a worker holds of versions of its weights: the one that it serves, the one before, the one that comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from ...engine.tensor_bytes import byte_view
from .arena import Arena
from .layout import Layout
from .messages import Table
from .staging import DOUBLE, STREAMED, Mode

__all__ = ["Version", "Versions", "Weights"]

Version = int | str | None


@dataclass
class Weights:
    """A version, and the arena that has its bytes, if one has. ``digests`` are those of the chunks, xxh3-64, and empty
    while they are not known: then somebody may be writing."""

    table: Table
    layout: Layout
    arena: Arena | None
    digests: list[int]
    version: Version = None
    put_in_by: str = ""
    """The transaction; by it, workers know the same version of one name from another."""

    @property
    def memory(self) -> torch.Tensor:
        assert self.arena is not None
        return self.arena.memory

    @property
    def address(self) -> list[Any]:
        assert self.arena is not None
        return self.arena.address.plain()

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return self.layout.nbytes if self.arena is not None else 0

    @property
    def digest(self) -> bytes:
        """Equal for equal bytes in equal layouts."""
        return xxhash.xxh3_128_digest(repr(self.digests).encode())

    def faults(self, digests: list[int]) -> list[int]:
        """Chunks of which the memory is not what the digests say."""
        data = byte_view(self.memory)
        offsets, sizes = self.layout.offsets, self.layout.sizes
        return [
            chunk
            for chunk, digest in enumerate(digests)
            if xxhash.xxh3_64_intdigest(data[offsets[chunk] : offsets[chunk] + sizes[chunk]]) != digest
        ]

    def copy_from(self, other: Weights, chunks: list[int]) -> None:
        """Take over chunks of one of the same layout."""
        offsets, sizes = self.layout.offsets, self.layout.sizes
        for chunk in chunks:
            span = slice(offsets[chunk], offsets[chunk] + sizes[chunk])
            self.memory[span].copy_(other.memory[span])

    def give_up(self) -> None:
        """Its bytes are not needed any more."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class Versions:
    """``served`` is None while a worker serves what it started with. ``next`` is being written, or will be: what it
    holds is what was served before."""

    def __init__(self) -> None:
        self.served: Weights | None = None
        self.next: Weights | None = None
        self._before: Weights | None = None

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return sum(weights.held for weights in (self.next, self.served) if weights is not None)

    @property
    def tokens(self) -> list[str]:
        """Of the arenas that are there: whoever has one mapped may go on using it."""
        return [one.arena.token for one in (self.next, self.served) if one is not None and one.arena is not None]

    def layout(self, digest: bytes, packed: bytes | None) -> Layout | None:
        """None where it is neither known nor given."""
        for weights in (self.next, self.served):
            if weights is not None and weights.layout.digest == digest:
                return weights.layout
        return None if packed is None else Layout.unpack(packed)

    def begin(self, table: Table, layout: Layout, mode: Mode, reads: Callable[[Weights], bool]) -> Weights:
        """``next``, made ready for a version of ``layout``. With one arena, or none, what is served loses its own.
        Nothing is written where somebody ``reads``."""
        found, served = self.next, self.served
        if found is not None and (found.layout.digest != layout.digest or not found.digests or reads(found)):
            # A sender of a push that failed may still be writing there.
            found.give_up()
            found = None
        if mode != DOUBLE and served is not None and served.arena is not None:
            if found is not None:
                found.give_up()
            fits = mode != STREAMED and served.layout.digest == layout.digest and not reads(served)
            found = replace(served) if fits else None
            if found is None:
                served.give_up()
            served.arena = None
        if mode == STREAMED:
            if found is not None:
                found.give_up()
            found = Weights(table, layout, None, [])
        self.next = found or Weights(table, layout, Arena(layout.nbytes), [])
        return self.next

    def serve_next(self, transaction: str) -> None:
        """``next`` has been put in."""
        assert self.next is not None
        self._before, self.served = self.served, self.next
        self.served.put_in_by = transaction
        self.next = self._before if self._before is not None and self._before.arena is not None else None

    def was_put_in_by(self, transaction: str) -> bool:
        """Whether what is served is of that transaction."""
        return self.served is not None and self.served.put_in_by == transaction

    @property
    def holds_before(self) -> bool:
        """Whether there are the bytes of what was served before."""
        return self._before is not None and self._before.arena is not None

    def take_back(self) -> None:
        """What was served before is served again."""
        taken, self.served, self._before = self.served, self._before, None
        self.next = taken if taken is not None and taken.arena is not None else None

    def give_up(self) -> None:
        """All memory. What is served goes on being served."""
        for weights in (self.next, self.served):
            if weights is not None:
                weights.give_up()
        self.next = None
