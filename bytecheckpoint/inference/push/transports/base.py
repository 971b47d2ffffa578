"""The interface of a transport, and the digests by which chunks are verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from ....engine.tensor_bytes import byte_view
from ....errors import EngineError

__all__ = ["Digest", "Place", "Transport", "TransportBroken", "digest_on_device", "word_digest", "xxh3_digest"]

Digest = Callable[[torch.Tensor], int]
"""Maps contiguous bytes to an unsigned 64-bit number."""

# Odd constants with well-mixed bits (from splitmix64 and xxh64), written as signed words for torch.
_STRIDE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


class Place(NamedTuple):
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
    def write(self, places: Sequence[Place], data: torch.Tensor, digest: int) -> None:
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


def digest_on_device(data: torch.Tensor) -> torch.Tensor:
    """Digest bytes on the device that holds them, with torch operations only.

    Each 8-byte word is mixed with its position, so that damaged, moved and missing words change the sum. The digest
    detects accidents; it does not resist an attacker.
    """
    full = data.numel() // 8 * 8
    is_aligned = data.data_ptr() % 8 == data.storage_offset() % 8 == 0
    words = data[:full].view(torch.int64) if is_aligned else data[:full].clone().view(torch.int64)
    found = _mix(words, 0)
    if full < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - full] = data[full:]
        found = found + _mix(rest.view(torch.int64), full // 8)
    return found ^ data.numel()


def _mix(words: torch.Tensor, begin: int) -> torch.Tensor:
    # Integer overflow wraps around on every device, and the order of the sum does not matter.
    mixed = torch.arange(begin + 1, begin + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_STRIDE).bitwise_xor_(words).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 29).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 32).sum()
