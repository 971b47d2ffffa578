"""Interface of the byte streams between ranks, for payloads that are too large to pass through rank 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

__all__ = ["Buffer", "NoStreams", "Streams"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""One-dimensional and contiguous."""


class Streams(ABC):
    """One ordered byte stream per channel, sender and receiver.

    Nothing frames the bytes: both sides compute from their plans how many bytes arrive in which order. Thread-safe,
    but each channel belongs to one thread at a time, per direction and peer. A send may block until the receiver
    reads. Streams belong to their operation: they raise what ``Operation``'s exchanges raise, after which the operation
    has failed on all ranks, and they are closed with it.
    """

    bytes_sent = 0
    """Bytes sent so far on all channels."""

    bytes_received = 0
    """Bytes received so far on all channels."""

    @abstractmethod
    def send(self, to: int, channel: str, data: Buffer) -> None:
        """Send bytes to a rank; return when the operating system has accepted all of them.

        Args:
            to: The receiver's rank.
            channel: Names the stream on both sides.
            data: The bytes; the caller may reuse the buffer afterwards.

        Raises:
            ControlError: The operation failed.
            ValueError: ``to`` is this rank or no rank of the job.
        """

    @abstractmethod
    def receive(self, source: int, channel: str, into: Buffer) -> None:
        """Fill a buffer with the next bytes of a stream.

        Args:
            source: The sender's rank.
            channel: Names the stream on both sides.
            into: A writable buffer; it is filled completely.

        Raises:
            ControlError: The operation failed.
            ValueError: ``source`` is this rank or no rank of the job.
        """


class NoStreams(Streams):
    """The streams of a job of one process, which has no peers."""

    def send(self, to: int, channel: str, data: Buffer) -> None:
        raise ValueError(f"cannot send to rank {to}: this is a job of one process")

    def receive(self, source: int, channel: str, into: Buffer) -> None:
        raise ValueError(f"cannot receive from rank {source}: this is a job of one process")
