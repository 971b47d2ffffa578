"""The layout of a version in a worker's memory: chunks, waves, and the writes that fill them.

A chunk is one box of a requested part, stored contiguously in row-major order and written by exactly one sender.
Planning, checksums, skipping of unchanged bytes, and error messages all work on chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import msgpack
import numpy as np
import torch
import xxhash

from ...errors import BytecheckpointError
from ...planners.balance import choose_writers
from ...planners.rank_sets import RankSets
from ...tensors.dtypes import DType
from ...tensors.geometry import Box
from ..layouts.parts import TensorBox
from .messages import pack, pack_parts, unpack_parts

ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every element size


def align(nbytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Round up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """The chunks of one worker, ``(part, box)`` each, stored one after another at aligned offsets.

    ``receptions`` states how they arrive over a group; see ``transports/group_transport.py``.
    """

    parts: tuple[TensorBox, ...]
    chunks: tuple[tuple[int, Box], ...]
    receptions: bytes = b""

    @cached_property
    def sizes(self) -> list[int]:
        return [box.numel * self.parts[part].dtype.itemsize for part, box in self.chunks]

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each chunk, and at the end the total size."""
        return [0, *accumulate(map(align, self.sizes))]

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @cached_property
    def chunks_of_part(self) -> dict[int, list[tuple[int, Box]]]:
        """The number and box of each chunk, by part."""
        found: dict[int, list[tuple[int, Box]]] = {}
        for number, (part, box) in enumerate(self.chunks):
            found.setdefault(part, []).append((number, box))
        return found

    def overlaps(self, part: int, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield the number and box of each chunk of ``part`` that intersects ``box``, and the intersection."""
        for number, held in self.chunks_of_part.get(part, ()):
            common = box.intersect(held)
            if common is not None:
                yield number, held, common

    def span(self, chunk: int) -> slice:
        """Return where the bytes of a chunk are."""
        return slice(self.offsets[chunk], self.offsets[chunk] + self.sizes[chunk])

    def name_of(self, chunk: int) -> str:
        """Return the name of a chunk in error messages."""
        part, box = self.chunks[chunk]
        return f"{self.parts[part].name} {box}"

    @cached_property
    def packed(self) -> bytes:
        chunks = [(part, *box) for part, box in self.chunks]
        return pack([pack_parts(self.parts), chunks, self.receptions])

    @cached_property
    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        parts, chunks, receptions = msgpack.unpackb(data, use_list=False)
        return cls(tuple(unpack_parts(parts)), tuple((part, Box(*box)) for part, *box in chunks), receptions)


class ArrivedChunk(NamedTuple):
    """The number of a chunk, the memory in which it is, and the digest that its sender computed."""

    number: int
    place: torch.Tensor
    digest: int


class ChunkStore(ABC):
    """The chunks of a version while senders write them (in other threads) and the engine's loader reads them."""

    @abstractmethod
    def claim(self, chunk: int, nbytes: int) -> torch.Tensor:
        """Return the memory of an announced chunk; ``nbytes`` is 0 when the sender wrote it there. Raises
        ``EngineError`` for a chunk that is not allowed now."""

    @abstractmethod
    def verify(self, chunks: Sequence[ArrivedChunk]) -> None:
        """Accept chunks that have arrived. Raises ``CorruptionError``."""

    def sender_failed(self, error: BytecheckpointError) -> None:  # noqa: B027 - a job notices its own sender's failure
        """A sender will deliver nothing more."""

    @abstractmethod
    def get(self, chunk: int) -> torch.Tensor:
        """Return the bytes of a chunk, which stay valid until ``release``."""

    def release(self, chunk: int) -> None:  # noqa: B027 - an arena keeps its chunks
        """End one use of a chunk. ``get`` may return it again."""


@dataclass(frozen=True)
class Waves:
    """The chunks of ``layout`` in waves, each of which fits into one slot of a ring buffer.

    Wave ``w`` occupies slot ``w % slots`` and may be written when wave ``w - slots`` has been freed. Both ends of a
    stream compute the same waves.
    """

    layout: Layout
    slots: int
    slot_bytes: int

    @cached_property
    def begins(self) -> list[int]:
        """The first chunk of each wave, and at the end the number of chunks."""
        offsets, begins = self.layout.offsets, [0]
        for chunk in range(len(self.layout.chunks)):
            if offsets[chunk + 1] - offsets[begins[-1]] > self.slot_bytes:
                begins.append(chunk)
        return [*begins, len(self.layout.chunks)]

    @cached_property
    def wave_of(self) -> list[int]:
        """The wave of each chunk."""
        return [wave for wave in range(self.count) for _ in self.chunks(wave)]

    @property
    def count(self) -> int:
        return len(self.begins) - 1

    @property
    def nbytes(self) -> int:
        """The size of the ring buffer."""
        return self.slots * self.slot_bytes

    def chunks(self, wave: int) -> range:
        return range(self.begins[wave], self.begins[wave + 1])

    def offset(self, chunk: int) -> int:
        """Return the offset of a chunk in the ring buffer."""
        wave = self.wave_of[chunk]
        return wave % self.slots * self.slot_bytes + self.layout.offsets[chunk] - self.layout.offsets[self.begins[wave]]


class Holding(NamedTuple):
    """A box of a tensor, and the senders that hold it, in ascending order."""

    box: Box
    senders: tuple[int, ...]


def choose_senders(sizes: Sequence[int], holders: Sequence[Sequence[int]], senders: int) -> list[int]:
    """Choose one of the ``holders`` of each item, so that the items are spread evenly by size."""
    starts = np.cumsum([0, *map(len, holders)])
    sets = RankSets(senders)
    numbers = sets.add(np.fromiter(chain.from_iterable(holders), np.int64), starts)
    chosen: list[int] = choose_writers(np.array(sizes, np.int64), numbers, sets).tolist()
    return chosen


class ChunkTarget(NamedTuple):
    """Where a chunk goes: number ``chunk`` of ``target``, at ``offset`` bytes in that target's memory. In a stream, the
    chunk belongs to a ``wave``. Offset and wave depend on the memory that targets provide, and are 0 until then."""

    target: int
    chunk: int
    offset: int = 0
    wave: int = 0


@dataclass(frozen=True)
class Write:
    """One sender casts ``box`` of the tensor ``name`` to ``dtype`` and writes it to ``places``, one chunk each."""

    name: str
    box: Box
    dtype: DType
    places: tuple[ChunkTarget, ...]

    @cached_property
    def nbytes(self) -> int:
        """The size in one place."""
        return self.box.numel * self.dtype.itemsize

    @property
    def nbytes_of_places(self) -> int:
        return self.nbytes * len(self.places)

    @cached_property
    def room(self) -> int:
        """The bytes that the chunk takes in memory with others."""
        return align(self.nbytes)
