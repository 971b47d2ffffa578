"""Bytes from rank to rank beside the store: for what is too much to pass through one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

__all__ = ["Buffer", "NoStreams", "Streams"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""One-dimensional and contiguous."""


class Streams(ABC):
    """One ordered stream of bytes for each channel, sender and receiver.

    Both sides know from their plans how many bytes come in which order; nothing frames them. Thread-safe, but each
    channel belongs, in each direction and for each peer, to one thread at a time. A rank that sends can block until
    the other receives. Raises what ``Operation``'s methods raise, on all ranks the same cause; the operation is then
    over. Belongs to its operation and is closed with it.
    """

    @abstractmethod
    def send(self, to: int, channel: str, data: Buffer) -> None:
        """Return when the system has taken everything; ``data`` may then be reused."""

    @abstractmethod
    def receive(self, source: int, channel: str, into: Buffer) -> None:
        """Fill ``into`` exactly with the stream's next bytes."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int: ...

    @property
    @abstractmethod
    def bytes_received(self) -> int: ...


class NoStreams(Streams):
    """Of a job of one process: there is nobody to send to."""

    def send(self, to: int, channel: str, data: Buffer) -> None:
        raise ValueError(f"cannot send to rank {to}: this is a job of one process")

    def receive(self, source: int, channel: str, into: Buffer) -> None:
        raise ValueError(f"cannot receive from rank {source}: this is a job of one process")

    @property
    def bytes_sent(self) -> int:
        return 0

    @property
    def bytes_received(self) -> int:
        return 0
