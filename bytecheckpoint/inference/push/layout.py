"""What lies where in an arena: the parts that a worker wants, in chunks that are boxes. Pure numbers.

A chunk is one box of a wanted part, in row-major order and in one piece, written by exactly one sender. It is the unit
of everything: of planning, of checksums, of what is skipped because it has not changed, and of damage that is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgpack
import xxhash

from ...geometry import Box
from ..parts import Part
from .messages import pack_parts, unpack_parts

__all__ = ["ALIGNMENT", "Layout", "cut_box"]

ALIGNMENT = 64  # bytes: every element type, and whole cache lines


def cut_box(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` bytes (or one element) that are contiguous runs of ``box``, in its order."""
    row = itemsize
    for d in reversed(range(box.ndim)):
        length = box.lengths[d]
        if row * length > limit:
            step = max(limit // row, 1)
            break
        row *= length
    else:
        yield box
        return
    outer = Box((0,) * d, box.lengths[:d])
    for index in _indices(outer.lengths):
        for begin in range(0, box.lengths[d], step):
            at = (*index, begin)
            lengths = (*(1 for _ in index), min(step, box.lengths[d] - begin), *box.lengths[d + 1 :])
            offsets = tuple(o + a for o, a in zip(box.offsets, at)) + box.offsets[d + 1 :]
            yield Box.proved(offsets, lengths)


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for first in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (first, *rest)


@dataclass(frozen=True)
class Layout:
    """``chunks`` are ``(part, box)``, one behind the other in the arena, each beginning at a multiple of
    ``ALIGNMENT``."""

    parts: tuple[Part, ...]
    chunks: tuple[tuple[int, Box], ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [box.numel * self.parts[part].dtype.itemsize for part, box in self.chunks]

    @cached_property
    def offsets(self) -> list[int]:
        """Of the chunks, and behind them the size of all."""
        return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes)]

    @property
    def nbytes(self) -> int:
        """Of the arena."""
        return self.offsets[-1]

    def name_of(self, chunk: int) -> str:
        """How errors call a chunk."""
        part, box = self.chunks[chunk]
        return f"{self.parts[part].name} {box}"

    @cached_property
    def packed(self) -> bytes:
        chunks = [[part, list(box.offsets), list(box.lengths)] for part, box in self.chunks]
        packed: bytes = msgpack.packb([pack_parts(self.parts), chunks])
        return packed

    @cached_property
    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        parts, chunks = msgpack.unpackb(data)
        boxes = tuple((part, Box(tuple(offsets), tuple(lengths))) for part, offsets, lengths in chunks)
        return cls(tuple(unpack_parts(parts)), boxes)
