"""The interface of a transport, and the digests by which chunks are verified."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import xxhash

from ....errors import EngineError
from ....frameworks.digests import digest_on_device
from ....runtime.threads import Threads
from ..layout import ChunkTarget

THREADS = min(4, len(os.sched_getaffinity(0)))
"""How many threads of a process make, copy and hash chunks."""

Digests = Callable[[Sequence[torch.Tensor]], list[int]]
"""Maps tensors of contiguous bytes to unsigned 64-bit numbers. A device computes those of several chunks at once,
because waiting for it takes longer than the computation."""


class OutgoingChunk(NamedTuple):
    """Contiguous bytes, their digest, and the places to which they go."""

    places: Sequence[ChunkTarget]
    data: torch.Tensor
    digest: int


class TransportBroken(EngineError):
    """The other end failed, or did not answer in time (``is_late``). Its own error is the cause."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


class Transport(ABC):
    """A sender's way into the memory of one or several workers, for one push. Safe for several threads."""

    @abstractmethod
    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        """Deliver the chunks in this order, and wait for room where there is none. The caller may reuse their memory
        when this returns."""

    def has_room(self, places: Sequence[ChunkTarget]) -> bool:
        """Whether ``write`` would deliver a chunk to these places without waiting for room."""
        return True

    def check(self) -> None:  # noqa: B027 - for transports whose other end reports nothing
        """Raise the failure that the other end has reported, if any."""

    def finish(self) -> None:  # noqa: B027 - for transports that deliver within `write`
        """Return when all data has arrived. Raises ``DeadlineError`` or ``EngineError``."""

    def interrupt(self) -> None:  # noqa: B027 - for transports that never wait
        """Make a ``write`` or ``finish`` that waits in another thread raise. Never raises itself."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings. Never raises."""


def hosts_of_engine() -> list[str]:
    """Return the address that the environment names for the engine of this process, if it names one."""
    return [*filter(None, [os.environ.get("VLLM_HOST_IP")])]


def xxh3_digests(chunks: Sequence[torch.Tensor]) -> list[int]:
    """Return the xxh3-64 digests of bytes in host memory."""
    return [xxhash.xxh3_64_intdigest(data.numpy().data) for data in chunks]


def find_damaged(chunks: Sequence[memoryview], digests: Sequence[int]) -> list[int]:
    """Return the positions of the chunks whose bytes do not have these xxh3-64 digests."""

    def find(positions: range) -> list[int]:
        return [at for at in positions if xxhash.xxh3_64_intdigest(chunks[at]) != digests[at]]

    with Threads(THREADS, "bcp-push-verify") as threads:
        parts = threads.map(find, [range(first, len(digests), THREADS) for first in range(THREADS)])
        return sorted(chain.from_iterable(parts))


def word_digests(chunks: Sequence[torch.Tensor]) -> list[int]:
    """Return ``digest_on_device`` of each chunk as an unsigned number."""
    found = [digest_on_device(rows) for rows in _as_rows(chunks)]
    return [digest % (1 << 64) for digest in torch.cat(found).tolist()] if found else []


def _as_rows(chunks: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield matrices whose rows are the chunks: a device digests adjacent chunks of one size with the same kernels."""
    count = 0
    for number, chunk in enumerate(chunks, 1):
        count += 1
        if number == len(chunks) or not _is_next(chunk, chunks[number]):
            first, length = chunks[number - count], chunk.numel()
            yield first.as_strided((count, length), (-(-length // 8) * 8, 1))  # one row may have any length
            count = 0


def _is_next(chunk: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``other`` is the next row of a matrix of 8-byte words with the row ``chunk``."""
    length = chunk.numel()
    return (
        length % 8 == 0
        and other.numel() == length
        and other.storage_offset() == chunk.storage_offset() + length
        and other.untyped_storage().data_ptr() == chunk.untyped_storage().data_ptr()
    )
