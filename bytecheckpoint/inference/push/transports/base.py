"""The interface of a transport, and the digests by which chunks are verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from ....engine.tensor_bytes import byte_view
from ....errors import EngineError
from ....frameworks.digests import digest_on_device

__all__ = ["ChunkTarget", "Digest", "Transport", "TransportBroken", "word_digest", "xxh3_digest"]

Digest = Callable[[torch.Tensor], int]
"""Maps contiguous bytes to an unsigned 64-bit number."""


class ChunkTarget(NamedTuple):
    """Where a chunk goes: ``offset`` bytes into the memory of ``target``, as that target's number ``chunk``. In a
    stream, the chunk belongs to a ``wave``."""

    target: int
    offset: int
    chunk: int = 0
    wave: int = 0


class TransportBroken(EngineError):
    """The other end failed, or did not answer in time (``is_late``). Its own error is the cause."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


class Transport(ABC):
    """A sender's way into the memory of one or several workers, for one push. Safe for several threads."""

    @abstractmethod
    def write(self, places: Sequence[ChunkTarget], data: torch.Tensor, digest: int) -> None:
        """Deliver ``data`` (contiguous bytes with this digest) to every place. The caller may reuse ``data`` when this
        returns."""

    def finish(self) -> None:  # noqa: B027 - for transports that deliver within `write`
        """Return when all data has arrived. Raises ``DeadlineError`` or ``EngineError``."""

    def interrupt(self) -> None:  # noqa: B027 - for transports that never wait
        """Make a ``write`` or ``finish`` that waits in another thread raise. Never raises itself."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings. Never raises."""


def xxh3_digest(data: torch.Tensor) -> int:
    """Return the xxh3-64 digest of bytes in host memory."""
    return xxhash.xxh3_64_intdigest(byte_view(data))


def word_digest(data: torch.Tensor) -> int:
    """Return ``digest_on_device`` as an unsigned number."""
    return int(digest_on_device(data)) % (1 << 64)
