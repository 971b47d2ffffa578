"""The ring that a push asks for: in shared memory, in that of a group's backend, or in the worker's device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...geometry import Box
from .device_arena import DeviceArena
from .digesting import Digest, words_of, xxh3_of
from .group_receiving import GroupMemory
from .layout import Layout
from .ring import Ring, RingMemory
from .waves import SLOT_BYTES, SLOTS, ring_of

__all__ = ["make_ring"]

_PATIENCE = 0.8  # of a sender's: who misses a chunk can say so, who waits for room only guesses


def make_ring(
    message: Mapping[str, Any], layout: Layout, takes: Sequence[tuple[int, Box]]
) -> tuple[Ring, dict[str, Any]]:
    """As *prepare* asks for it, and what senders have to know. Raises ``EngineError`` where memory does not suffice,
    ``StateError`` where this worker has no such memory."""
    limit = message["memory"]
    waves = ring_of(layout, SLOTS * SLOT_BYTES if limit is None else limit)
    memory: RingMemory | None = None
    digest: Digest = xxh3_of
    if message["group"]:
        memory = GroupMemory(message["group"], waves.nbytes)
    elif message["cuda_ipc"]:
        memory, digest = DeviceArena(waves.nbytes), words_of
    ring = Ring(waves, takes, _PATIENCE * message["deadline_s"], memory, digest)
    place = {
        "arena": ring.memory and ring.memory.plain(),
        "ring": [waves.slots, waves.slot_bytes, ring.port.plain()],
    }
    return ring, place
