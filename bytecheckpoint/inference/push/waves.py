"""What is streamed through a ring of slots: the chunks of a layout in waves, each of which fits into a slot. Pure
numbers, the same on both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...errors import EngineError
from .layout import ALIGNMENT, Layout

__all__ = ["Waves", "ring_of"]

SLOTS = 4
SLOT_BYTES = 64 << 20  # longer ones overlap no better


@dataclass(frozen=True)
class Waves:
    """The chunks of ``layout``, in its order; wave ``w`` lies in slot ``w % slots``, and may be written when wave
    ``w - slots`` has been taken out."""

    layout: Layout
    slots: int
    slot_bytes: int

    @cached_property
    def begins(self) -> list[int]:
        """The first chunk of each wave, and behind them the number of all chunks."""
        offsets, begins = self.layout.offsets, [0]
        for chunk in range(len(self.layout.chunks)):
            if offsets[chunk + 1] - offsets[begins[-1]] > self.slot_bytes:
                begins.append(chunk)
        return [*begins, len(self.layout.chunks)]

    @cached_property
    def wave_of(self) -> list[int]:
        """By chunk."""
        return [wave for wave in range(self.count) for _ in self.chunks(wave)]

    @property
    def count(self) -> int:
        return len(self.begins) - 1

    @property
    def nbytes(self) -> int:
        """Of the ring."""
        return self.slots * self.slot_bytes

    def chunks(self, wave: int) -> range:
        return range(self.begins[wave], self.begins[wave + 1])

    def offset(self, chunk: int) -> int:
        """In the ring."""
        wave = self.wave_of[chunk]
        return wave % self.slots * self.slot_bytes + self.layout.offsets[chunk] - self.layout.offsets[self.begins[wave]]


def ring_of(layout: Layout, limit: int) -> Waves:
    """The ring that fits into ``limit`` bytes: as many slots as overlap well, fewer where chunks are too long for that,
    and one at least (then nothing overlaps). Raises ``EngineError`` where the longest chunk does not fit."""
    longest = max((-(-size // ALIGNMENT) * ALIGNMENT for size in layout.sizes), default=ALIGNMENT)
    if longest > limit:
        raise EngineError(
            f"a worker may use {limit:,} bytes for a push, and one chunk takes {longest:,}; give Pusher more "
            "memory_bytes, or smaller chunk_bytes"
        )
    limit = min(limit, max(layout.nbytes, longest))
    slot_bytes = max(longest, min(SLOT_BYTES, limit // SLOTS) // ALIGNMENT * ALIGNMENT)
    return Waves(layout, min(SLOTS, limit // slot_bytes), slot_bytes)
